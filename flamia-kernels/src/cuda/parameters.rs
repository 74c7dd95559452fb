//! One definition of a kernel's parameters; `parameters.cuh` is the other half.

/// Defines the struct that a kernel takes by value, and `defines`, the macros that `SAME_OFFSET`
/// compares with the fields of the kernel's own struct, so that one that differs does not compile.
macro_rules! parameters {
    ($(#[$meta:meta])* $vis:vis struct $name:ident { $($field:ident: $type:ty,)* }) => {
        $(#[$meta])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, bytemuck::NoUninit)]
        $vis struct $name { $($vis $field: $type,)* }

        impl $name {
            fn defines() -> Vec<(&'static str, String)> {
                vec![$((
                    concat!("OFFSET_", stringify!($field)),
                    std::mem::offset_of!($name, $field).to_string(),
                )),*]
            }
        }
    };
}
pub(crate) use parameters;
