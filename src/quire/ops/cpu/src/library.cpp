// What a library says of itself.
#include "simd.h"

// The same number as `VERSION` of library.py: it is raised there and here whenever a kernel's bits, or a function's
// arguments, change.
QUIRE_API int32_t quire_version() { return 20; }
