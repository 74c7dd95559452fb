//! Work captured once and replayed, and the time that work takes.

use crate::error::GpuError;
use crate::ffi::handles::{Capture, EventHandle, GraphHandle};
use crate::gpu::Gpu;
use crate::launch::Stream;

/// Work that was captured from a stream.
#[derive(Debug)]
pub struct Graph(GraphHandle);

impl Graph {
    /// Captures what `work` gives to the stream, and runs nothing of it. The stream is one that was
    /// made, not the legacy default stream, which cannot be captured. If `work` fails or panics,
    /// the capture ends with it.
    ///
    /// # Safety
    /// - The stream is one of this GPU, and captures nothing yet.
    /// - What the captured work uses, memory and modules, is valid until the last replay has run.
    pub unsafe fn capture<E: From<GpuError>>(
        gpu: &Gpu,
        stream: Stream<'_>,
        work: impl FnOnce(Stream<'_>) -> Result<(), E>,
    ) -> Result<Self, E> {
        let capture = Capture::begin(gpu.context(), stream.raw())?;
        work(stream)?;
        Ok(Self(capture.end()?))
    }

    /// Gives the work to the stream once more, and returns without waiting for it. The stream is
    /// one of the graph's GPU. Replays of one graph run one after another.
    pub fn replay(&mut self, stream: Stream<'_>) -> Result<(), GpuError> {
        self.0.launch(stream.raw())
    }
}

/// Takes the time of work on a stream, on the GPU's clock.
#[derive(Debug)]
pub struct Timer {
    start: EventHandle,
    end: EventHandle,
}

impl Timer {
    /// A timer of this GPU.
    pub fn new(gpu: &Gpu) -> Result<Self, GpuError> {
        let event = || EventHandle::new(gpu.context());
        Ok(Self {
            start: event()?,
            end: event()?,
        })
    }

    /// The microseconds from where the stream stands to the end of what `work` gives to it. Waits
    /// for it.
    pub fn time<E: From<GpuError>>(
        &mut self,
        stream: Stream<'_>,
        work: impl FnOnce(Stream<'_>) -> Result<(), E>,
    ) -> Result<f64, E> {
        self.start.record(stream.raw())?;
        work(stream)?;
        self.end.record(stream.raw())?;
        Ok(f64::from(self.start.milliseconds_to(&self.end)?) * 1e3)
    }
}
