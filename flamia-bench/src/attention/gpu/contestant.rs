//! What it takes to be timed.

use flamia_cuda::{Gpu, Graph, Stream, Timer};
use flamia_kernels::cuda::call::FormChoice;

use super::error::GpuBenchError;
use crate::attention::row::{Memory, Pass, Quantisation, System};

/// A call that can be timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    pub pass: Pass,
    /// Missing where nothing is quantised.
    pub quantisation: Option<Quantisation>,
}

/// A system with everything that its calls on one workload need.
pub trait Contestant {
    fn system(&self) -> System;

    /// What it can do.
    fn calls(&self) -> Vec<Call>;

    /// Gives a call to the stream, torch's current one, and waits for nothing.
    fn launch(&self, call: Call, stream: Stream<'_>) -> Result<(), GpuBenchError>;

    /// What the call occupied beyond operands and results, where that was measured.
    fn memory(&self, call: Call) -> Option<Memory>;

    /// What a reader of its times should know.
    fn note(&self) -> &'static str;

    /// What kernels the backward pass in the call is of, where that can be chosen.
    fn form(&self, call: Call) -> Option<FormChoice>;
}

/// A call that was run before, as it is timed.
pub struct Timed<'a> {
    contestant: &'a dyn Contestant,
    call: Call,
    graph: Option<Graph>,
}

impl<'a> Timed<'a> {
    /// Runs the call without a graph, so that what is made at the first call exists, and torch has
    /// the memory at hand that the call takes.
    pub fn warm(
        contestant: &'a dyn Contestant,
        call: Call,
        stream: Stream<'_>,
    ) -> Result<Self, GpuBenchError> {
        for _ in 0..2 {
            contestant.launch(call, stream)?;
        }
        Ok(Self {
            contestant,
            call,
            graph: None,
        })
    }

    /// Captures the call. One that cannot be captured is timed as it is launched.
    ///
    /// What torch allocates in a capture and frees there is torch's to hand out again: to the next
    /// capture, as if both were calls that run one after another, which replays do. Hence nothing is
    /// allocated to be kept after the first capture of a workload, and every call was
    /// [warm](Self::warm) before it, so that no capture asks the driver for memory.
    pub fn capture(&mut self, gpu: &Gpu, stream: Stream<'_>) {
        let (contestant, call) = (self.contestant, self.call);
        // SAFETY: the stream is this GPU's, idle but for what was launched, and made. The memory stays
        // mapped: by the contestant, or by torch, which unmaps nothing unless memory runs out.
        let graph =
            unsafe { Graph::capture(gpu, stream, |stream| contestant.launch(call, stream)) };
        self.graph = match graph {
            Ok(graph) => Some(graph),
            Err(error) => {
                let (system, pass) = (contestant.system().name, call.pass);
                eprintln!("{system}, {pass}: launched, since it cannot be captured: {error}");
                None
            }
        };
    }

    pub fn is_graph(&self) -> bool {
        self.graph.is_some()
    }

    /// Milliseconds of the call right after one of the same, which leaves in the L2 cache what it
    /// leaves there.
    pub fn ms(&mut self, timer: &mut Timer, stream: Stream<'_>) -> Result<f64, GpuBenchError> {
        self.run(stream)?;
        let microseconds = timer.time(stream, |stream| self.run(stream))?;
        Ok(microseconds / 1e3)
    }

    fn run(&mut self, stream: Stream<'_>) -> Result<(), GpuBenchError> {
        match &mut self.graph {
            Some(graph) => Ok(graph.replay(stream)?),
            None => self.contestant.launch(self.call, stream),
        }
    }
}
