//! Structs that the host and kernels share, compared field by field when a kernel is compiled.

use crate::source::Header;

/// What compares a struct of a kernel with the host's; the other half of
/// [`parameters!`](crate::parameters).
pub const PARAMETERS_HEADER: Header = crate::header!("parameters.cuh");

/// Defines a struct that a kernel takes by value or that lies in device memory, and `defines`, the
/// macros that say where its fields are.
///
/// A kernel that includes [`PARAMETERS_HEADER`] writes `SAME_OFFSET(Name, field);` for each field of
/// its own struct `Name`, and does not compile if a field lies elsewhere on the host, or if one struct
/// is longer. The crate that calls has to depend on `bytemuck`, which sees that there is no padding.
///
/// ```
/// use flamia_cuda::{Header, PARAMETERS_HEADER, Source, parameters};
///
/// parameters! {
///     /// What the kernel takes.
///     struct Parameters {
///         x: u64,
///         count: u32,
///         by: f32,
///     }
/// }
///
/// const SCALE: Source = Source {
///     name: "scale.cu",
///     text: r#"
///         #include "parameters.cuh"
///         struct Parameters { float *x; unsigned count; float by; };
///         SAME_OFFSET(Parameters, x);
///         SAME_OFFSET(Parameters, count);
///         SAME_OFFSET(Parameters, by);
///         extern "C" __global__ void scale(const __grid_constant__ Parameters p) {
///             if (threadIdx.x < p.count) p.x[threadIdx.x] *= p.by;
///         }
///     "#,
///     headers: &[PARAMETERS_HEADER],
/// };
/// let defines = Parameters::defines();
/// assert!(defines.contains(&("OFFSET_Parameters_by", "12".to_owned())));
/// assert!(defines.contains(&("SIZEOF_Parameters", "16".to_owned())));
/// ```
#[macro_export]
macro_rules! parameters {
    ($(#[$meta:meta])* $vis:vis struct $name:ident { $($field:ident: $type:ty,)* }) => {
        $(#[$meta])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, bytemuck::NoUninit)]
        $vis struct $name { $(pub(crate) $field: $type,)* }

        impl $name {
            /// The macros that kernels compare their struct with.
            pub(crate) fn defines() -> Vec<(&'static str, String)> {
                vec![
                    $((
                        concat!("OFFSET_", stringify!($name), "_", stringify!($field)),
                        std::mem::offset_of!($name, $field).to_string(),
                    ),)*
                    (concat!("SIZEOF_", stringify!($name)), size_of::<$name>().to_string()),
                ]
            }
        }
    };
}
