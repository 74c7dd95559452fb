//! What a launch is given: its shape, its stream and its arguments.

use std::fmt;
use std::marker::PhantomData;

use bytemuck::NoUninit;
use cudarc::driver::CudaStream;

use crate::ffi::handles::RawStream;

/// The shape of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Blocks, in x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block, in x, y and z.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory of a block.
    pub shared: u32,
    /// Whether it may start before the kernel in front of it on the stream is over; see
    /// [`Launch::starting_early`].
    pub starts_early: bool,
}

impl Launch {
    /// A row of blocks of a row of threads, without dynamic shared memory.
    pub const fn linear(blocks: u32, threads: u32) -> Self {
        Self {
            grid: [blocks, 1, 1],
            block: [threads, 1, 1],
            shared: 0,
            starts_early: false,
        }
    }

    /// The same with this many bytes of dynamic shared memory.
    #[must_use]
    pub const fn with_shared(self, shared: u32) -> Self {
        Self { shared, ..self }
    }

    /// The same, starting as soon as every block of the kernel in front of it on the stream has run
    /// `griddepcontrol.launch_dependents` or is over (programmatic dependent launch). That kernel's
    /// results are there only once `griddepcontrol.wait` has returned, which every block of this one
    /// has to call: work after it on the stream takes it that everything before is over too.
    ///
    /// From compute capability 9.0 on; other GPUs refuse the launch.
    #[must_use]
    pub const fn starting_early(self) -> Self {
        Self {
            starts_early: true,
            ..self
        }
    }
}

impl fmt::Display for Launch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            grid: [gx, gy, gz],
            block: [bx, by, bz],
            shared,
            starts_early: _,
        } = self;
        write!(
            f,
            "{gx} x {gy} x {gz} blocks of {bx} x {by} x {bz} threads and {shared} bytes of dynamic shared memory"
        )
    }
}

/// A stream, of whichever library made it. Work on it runs in order.
#[derive(Clone, Copy, Debug)]
pub struct Stream<'a> {
    raw: RawStream,
    alive: PhantomData<&'a CudaStream>,
}

impl Stream<'_> {
    /// The stream behind a `CUstream` or `cudaStream_t`, such as torch's current stream. Null is
    /// the legacy default stream.
    ///
    /// # Safety
    /// It is a stream, and stays one for this value's lifetime, which the caller chooses.
    pub unsafe fn from_raw(stream: *mut std::ffi::c_void) -> Self {
        Self {
            raw: RawStream(stream.cast()),
            alive: PhantomData,
        }
    }

    /// The `CUstream`.
    pub fn as_raw(self) -> *mut std::ffi::c_void {
        self.raw.0.cast()
    }

    pub(crate) fn raw(self) -> RawStream {
        self.raw
    }
}

impl<'a> From<&'a CudaStream> for Stream<'a> {
    fn from(stream: &'a CudaStream) -> Self {
        Self {
            raw: RawStream(stream.cu_stream()),
            alive: PhantomData,
        }
    }
}

/// A kernel's arguments: a tuple of plain values, each laid out as the kernel's parameter is.
///
/// Scalars are passed as themselves, device pointers as `u64`, and structs as `#[repr(C)]` types
/// that derive [`bytemuck::NoUninit`] (or `Pod`), which refuses padding. A launch compares the
/// number and sizes of the values with the kernel's parameters.
pub trait Arguments: sealed::Arguments {}

pub(crate) mod sealed {
    use std::ffi::c_void;

    /// The address and size of one argument.
    #[derive(Clone, Copy)]
    pub struct Argument {
        pub address: *const c_void,
        pub size: usize,
    }

    pub trait Arguments {
        /// Calls `f` with the arguments' places, which are valid during the call.
        fn with<R>(&self, f: impl FnOnce(&[Argument]) -> R) -> R;
    }
}

impl sealed::Argument {
    fn of<T: NoUninit>(value: &T) -> Self {
        Self {
            address: std::ptr::from_ref(value).cast(),
            size: size_of::<T>(),
        }
    }
}

macro_rules! arguments {
    ($($name:ident)*) => {
        impl<$($name: NoUninit),*> Arguments for ($($name,)*) {}

        impl<$($name: NoUninit),*> sealed::Arguments for ($($name,)*) {
            #[allow(non_snake_case)]
            fn with<R>(&self, f: impl FnOnce(&[sealed::Argument]) -> R) -> R {
                let ($($name,)*) = self;
                f(&[$(sealed::Argument::of($name)),*])
            }
        }
    };
}

arguments!();
arguments!(A);
arguments!(A B);
arguments!(A B C);
arguments!(A B C D);
arguments!(A B C D E);
arguments!(A B C D E F);
arguments!(A B C D E F G);
arguments!(A B C D E F G H);
arguments!(A B C D E F G H I);
arguments!(A B C D E F G H I J);
arguments!(A B C D E F G H I J K);
arguments!(A B C D E F G H I J K L);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_passed_in_order_with_their_sizes() {
        let arguments = (1_u8, 2.5_f32, [3_u16, 4], 0xdead_beef_u64);
        sealed::Arguments::with(&arguments, |places| {
            let sizes: Vec<_> = places.iter().map(|place| place.size).collect();
            assert_eq!(sizes, [1, 4, 4, 8]);
            assert!(std::ptr::eq(
                places[0].address.cast(),
                &raw const arguments.0
            ));
            assert!(std::ptr::eq(
                places[3].address.cast(),
                &raw const arguments.3
            ));
        });
        sealed::Arguments::with(&(), |places| assert!(places.is_empty()));
    }
}
