// `dot4` of many vectors, for tests/test_cpu_dots.py.
#include "dots.h"

// sums [count, 16] += the dot products of a and b [count, 16, 4].
extern "C" void add_dots(int32_t* sums, const uint32_t* a, const uint32_t* b, int64_t count) {
    using namespace quire;
    for (int64_t i = 0; i < count; i++, sums += LANES, a += LANES, b += LANES)
        store_as(sums, dot4(load_as<i32x16>(sums), load_as<u32x16>(a), load_as<u32x16>(b)));
}
