// One definition of the structs that host and kernels share: the host names where each field of its struct
// lies as OFFSET_struct_field, and the length of the whole as SIZEOF_struct (`parameters.rs`). A struct that
// differs does not compile.
#pragma once

// The expression is what `offsetof` is to NVRTC, which has no header that defines it.
#define SAME_OFFSET(type, field)                                                            \
    static_assert(__INTADDR__(&((type *)nullptr)->field) == OFFSET_##type##_##field,        \
                  #type "::" #field " is elsewhere in the host's struct");                  \
    static_assert(sizeof(type) == SIZEOF_##type, #type " has another length on the host")
