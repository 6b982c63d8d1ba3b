// For wheels: what newer C libraries gave a new version is asked for in its old one, so that a library compiled here
// loads where glibc is 2.28. Those functions compute the same; `exp` and `log` also set errno in the old version.
#if defined(__x86_64__)
#define OLD "GLIBC_2.2.5"
#else
#define OLD "GLIBC_2.17"
#endif
__asm__(".symver exp,exp@" OLD);
__asm__(".symver log,log@" OLD);
__asm__(".symver pthread_create,pthread_create@" OLD);
__asm__(".symver pthread_detach,pthread_detach@" OLD);
__asm__(".symver pthread_join,pthread_join@" OLD);
__asm__(".symver pthread_sigmask,pthread_sigmask@" OLD);
#undef OLD
