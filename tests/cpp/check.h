// What the programs here share: a check that `assert` is not (it stays with -DNDEBUG), and tests that are run by name.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#define CHECK(what)                                                       \
    do {                                                                  \
        if (!(what)) {                                                    \
            std::fprintf(stderr, "line %d: not so: %s\n", __LINE__, #what); \
            std::abort();                                                 \
        }                                                                 \
    } while (0)

struct Test {
    const char* name;
    void (*run)();
};

// Runs the test that the first argument names; without arguments, prints which there are.
inline int run_named(int count, char** arguments, std::initializer_list<Test> tests) {
    for (const Test& test : tests)
        if (count == 2 && !std::strcmp(arguments[1], test.name)) {
            test.run();
            return 0;
        }
    for (const Test& test : tests) std::puts(test.name);
    return count == 1 ? 0 : 2;
}
