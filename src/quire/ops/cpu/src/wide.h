// ARM's vectors of more numbers than a register has.
#pragma once

#include <arm_neon.h>

#define MEMBER inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 4")

namespace quire {

// N numbers in vectors of the machine's width. A vector that is wider GCC keeps in memory, from one operation to the next;
// these it keeps in registers, once loops over them are unrolled.
template <class T, int N>
struct Wide {
    typedef T Part __attribute__((vector_size(16)));
    static constexpr int EACH = 16 / sizeof(T), PARTS = N / EACH;
    Part part[PARTS];

    MEMBER T operator[](int lane) const { return part[lane / EACH][lane % EACH]; }
    template <class To>
    MEMBER explicit operator Wide<To, N>() const {  // the same bits
        Wide<To, N> to;
        for (int i = 0; i < PARTS; i++) to.part[i] = (typename Wide<To, N>::Part)part[i];
        return to;
    }
#define QUIRE_OPERATOR(OP)                                                           \
    MEMBER friend Wide operator OP(Wide a, Wide b) {                                 \
        UNROLLED for (int i = 0; i < PARTS; i++) a.part[i] = a.part[i] OP b.part[i]; \
        return a;                                                                    \
    }                                                                                \
    MEMBER friend Wide operator OP(Wide a, T b) {                                    \
        UNROLLED for (int i = 0; i < PARTS; i++) a.part[i] = a.part[i] OP b;         \
        return a;                                                                    \
    }                                                                                \
    MEMBER friend Wide operator OP(T a, Wide b) {                                    \
        UNROLLED for (int i = 0; i < PARTS; i++) b.part[i] = a OP b.part[i];         \
        return b;                                                                    \
    }                                                                                \
    template <class B>                                                               \
    MEMBER Wide& operator OP##=(B b) {                                               \
        return *this = *this OP b;                                                   \
    }
    QUIRE_OPERATOR(+)
    QUIRE_OPERATOR(-)
    QUIRE_OPERATOR(*)
    QUIRE_OPERATOR(/)
    QUIRE_OPERATOR(&)
    QUIRE_OPERATOR(|)
    QUIRE_OPERATOR(^)
    QUIRE_OPERATOR(<<)
    QUIRE_OPERATOR(>>)
#undef QUIRE_OPERATOR
#undef UNROLLED
    MEMBER friend Wide operator-(Wide a) {
        for (Part& part : a.part) part = -part;
        return a;
    }
    MEMBER friend Wide operator~(Wide a) {
        for (Part& part : a.part) part = ~part;
        return a;
    }
};

template <class V>
constexpr bool is_wide = false;
template <class T, int N>
constexpr bool is_wide<Wide<T, N>> = true;

}  // namespace quire
