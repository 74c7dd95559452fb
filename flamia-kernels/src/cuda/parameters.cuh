// One definition of a kernel's parameters: the host names the offset of each field of its struct as
// OFFSET_field (`parameters.rs`), and a struct that differs does not compile.
#pragma once

// The expression is what `offsetof` is to NVRTC, which has no header that defines it.
#define SAME_OFFSET(type, field)                                                    \
    static_assert(__INTADDR__(&((type *)nullptr)->field) == OFFSET_##field,          \
                  #type "::" #field " is elsewhere in the host's struct")
