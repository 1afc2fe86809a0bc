#pragma once
/// FSDP_API marks what libfsdp.so exports; everything else in it is hidden.
#if defined(_WIN32)
#define FSDP_API
#else
#define FSDP_API __attribute__((visibility("default")))
#endif
