//! torch's CUDA streams and what its tensors occupy, for work that torch and other libraries share.

use std::ffi::{c_char, c_void};

use crate::ffi::take_text;

/// What torch answers to a request about a GPU that it refuses.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "torch cannot {doing} on GPU {device}: {message}; call `load_cuda` first, and see that the GPU is there"
)]
pub struct StreamError {
    /// What was asked for.
    pub doing: &'static str,
    /// Which GPU.
    pub device: i32,
    /// torch's words.
    pub message: String,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct RawStream {
    id: i64,
    device: i32,
    handle: *mut c_void,
}

const NO_STREAM: RawStream = RawStream {
    id: 0,
    device: 0,
    handle: std::ptr::null_mut(),
};

unsafe extern "C" {
    fn flamia_stream_new(device: i32, stream: *mut RawStream) -> *mut c_char;
    fn flamia_stream_enter(
        stream: *const RawStream,
        previous: *mut RawStream,
        previous_device: *mut i32,
    ) -> *mut c_char;
    fn flamia_stream_leave(previous: *const RawStream, previous_device: i32) -> *mut c_char;
    fn flamia_device_use(device: i32) -> *mut c_char;
    fn flamia_memory(device: i32, now: *mut i64, peak: *mut i64) -> *mut c_char;
    fn flamia_memory_reset_peak(device: i32) -> *mut c_char;
}

/// Makes a GPU this thread's current one, where torch puts what names none: a process of several, each with a
/// GPU of its own, would otherwise occupy the first one too.
///
/// # Errors
/// There is no such GPU, or torch's CUDA part is not loaded.
pub fn use_gpu(device: usize) -> Result<(), StreamError> {
    let device = i32::try_from(device).unwrap_or(i32::MAX);
    // SAFETY: the text is ours.
    done("work by default", device, unsafe {
        take_text(flamia_device_use(device))
    })
}

/// One of torch's streams, which torch keeps for as long as the process lives.
#[derive(Clone, Copy, Debug)]
pub struct TorchStream(RawStream);

impl TorchStream {
    /// A stream of this GPU. torch has a few dozen, and hands them out in turn.
    ///
    /// # Errors
    /// There is no such GPU, or torch's CUDA part is not loaded.
    pub fn new(device: i32) -> Result<Self, StreamError> {
        let mut stream = NO_STREAM;
        // SAFETY: the pointer is to a live local, and the text is ours.
        let refusal = unsafe { take_text(flamia_stream_new(device, &mut stream)) };
        done("make a stream", device, refusal)?;
        Ok(Self(stream))
    }

    /// The `cudaStream_t`.
    pub fn as_raw(&self) -> *mut c_void {
        self.0.handle
    }

    /// Runs `work` with this as the thread's current stream: what torch is asked to do inside, it
    /// gives to this stream, and what it allocates inside belongs to it.
    ///
    /// # Errors
    /// torch refuses.
    pub fn run<R>(&self, work: impl FnOnce() -> R) -> Result<R, StreamError> {
        let mut guard = Entered {
            previous: NO_STREAM,
            previous_device: 0,
        };
        let (previous, device) = (&mut guard.previous, &mut guard.previous_device);
        // SAFETY: the pointers are to live locals, and the text is ours.
        let refusal = unsafe { take_text(flamia_stream_enter(&self.0, previous, device)) };
        if let Err(error) = done("change the stream", self.0.device, refusal) {
            // Nothing to leave.
            std::mem::forget(guard);
            return Err(error);
        }
        Ok(work())
    }
}

/// Leaves the stream again, panic or not.
struct Entered {
    previous: RawStream,
    previous_device: i32,
}

impl Drop for Entered {
    fn drop(&mut self) {
        // What was current before can be so again.
        // SAFETY: the pointer is to a live field, and the text is ours.
        let _ = unsafe { take_text(flamia_stream_leave(&self.previous, self.previous_device)) };
    }
}

/// Bytes that torch's tensors occupy on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TorchMemory {
    /// At this moment.
    pub now: u64,
    /// At most, since the peak was last reset.
    pub peak: u64,
}

impl TorchMemory {
    /// What is occupied.
    ///
    /// # Errors
    /// There is no such GPU, or torch has not used it yet.
    pub fn of(device: i32) -> Result<Self, StreamError> {
        let (mut now, mut peak) = (0, 0);
        // SAFETY: the pointers are to live locals, and the text is ours.
        let refusal = unsafe { take_text(flamia_memory(device, &mut now, &mut peak)) };
        done("tell the memory", device, refusal)?;
        let [now, peak] = [now, peak].map(|bytes: i64| bytes.unsigned_abs());
        Ok(Self { now, peak })
    }

    /// What is occupied, which is the peak as well from here on.
    ///
    /// # Errors
    /// As [`TorchMemory::of`].
    pub fn reset(device: i32) -> Result<Self, StreamError> {
        // SAFETY: the text is ours.
        let refusal = unsafe { take_text(flamia_memory_reset_peak(device)) };
        done("reset the memory's peak", device, refusal)?;
        Self::of(device)
    }
}

fn done(doing: &'static str, device: i32, refusal: Option<String>) -> Result<(), StreamError> {
    match refusal {
        None => Ok(()),
        Some(message) => Err(StreamError {
            doing,
            device,
            message,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// No test of this crate's library loads torch's CUDA part.
    #[test]
    fn without_torch_on_a_gpu_there_are_errors() {
        for error in [
            TorchStream::new(0).map(drop).unwrap_err(),
            TorchMemory::of(0).map(drop).unwrap_err(),
            TorchMemory::reset(7).map(drop).unwrap_err(),
            use_gpu(0).unwrap_err(),
        ] {
            let told = error.to_string();
            assert!(told.contains("load_cuda"), "{told}");
            assert!(!error.message.is_empty() && told.contains(&error.message));
        }
        let ran: Result<(), _> = TorchStream(NO_STREAM).run(|| panic!("there is no stream"));
        assert_eq!(ran.unwrap_err().doing, "change the stream");
    }
}
