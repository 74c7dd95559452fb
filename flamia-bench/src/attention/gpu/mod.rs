//! What runs on the GPU: operands, systems, comparisons and the clock.

pub mod ablate;
mod check;
mod contestant;
mod error;
mod flamia;
mod libtorch;
pub mod memory;
mod operands;

use flamia_autograd::peers::{Peer, PeerError};
use flamia_autograd::{TorchStream, load_cuda, torch_version};
use flamia_cuda::{Gpu, Stream, Timer};
use flamia_kernels::cuda::call::{CallError, Kernels, SavedImages};
use flamia_probe::progress::Progress;
use flamia_probe::report::commit;

use self::check::{Check, Checker};
use self::contestant::{Call, Contestant, Timed};
pub use self::error::GpuBenchError;
use self::flamia::Flamia;
pub use self::flamia::NAME as OURS;
use self::libtorch::{Libtorch, tell};
use self::operands::{Device, Operands};
use super::rounds::medians;
use super::row::{Masking, Measurement, Setting};
use super::way::Way;
use super::workload::Shape;
use super::{Attention, Entrant};

/// Rounds whose times are not looked at, in which the GPU gets up to speed.
const WARM_UP: u32 = 2;

/// What was found out.
pub struct Found {
    pub checks: Vec<Check>,
    pub measurements: Vec<Measurement>,
    pub setting: Setting,
}

/// A GPU that torch and the kernels share.
struct Session {
    device: Device,
    stream: TorchStream,
    setting: Setting,
}

impl Session {
    /// With the GPU of this number.
    fn open(gpu: usize) -> Result<Self, GpuBenchError> {
        if !load_cuda()? {
            return Err(GpuBenchError::NoGpu);
        }
        let kernels = Kernels::new(Gpu::new(gpu)?);
        // Such a GPU exists, so that its number is small.
        let ordinal = i32::try_from(gpu).unwrap_or(i32::MAX);
        Ok(Self {
            setting: Setting {
                gpu: kernels.gpu().name().to_owned(),
                driver: kernels.gpu().driver().to_string(),
                torch: torch_version().to_owned(),
                commit: commit().map(str::to_owned),
            },
            device: Device {
                torch: tch::Device::Cuda(gpu),
                ordinal,
                kernels,
            },
            stream: TorchStream::new(ordinal)?,
        })
    }

    /// Does the work with torch's current stream set to this session's, which the work is told.
    fn run<T>(
        &self,
        work: impl FnOnce(Stream<'_>) -> Result<T, GpuBenchError>,
    ) -> Result<T, GpuBenchError> {
        self.stream.run(|| {
            // SAFETY: torch keeps its streams.
            let raw = unsafe { Stream::from_raw(self.stream.as_raw()) };
            work(raw)
        })?
    }
}

/// Compares, and unless comparing is all that was asked for, times.
pub fn run(settings: &Attention) -> Result<Found, GpuBenchError> {
    let session = Session::open(settings.gpu)?;
    let device = &session.device;
    let mut found = Found {
        checks: Vec::new(),
        measurements: Vec::new(),
        setting: session.setting.clone(),
    };
    let shapes = settings.shapes();
    let progress = Progress::new(shapes.len() * settings.mask.len());
    session.run(|stream| {
        for shape in shapes {
            let operands = Operands::draw(device, shape)?;
            for &mask in &settings.mask {
                progress.at(format_args!("{}, {mask}", shape.name));
                let mut checker = Checker::new(shape, mask);
                let line_up = line_up(settings, device, stream, &operands, &mut checker)?;
                found.checks.extend(checker.checks);
                if !settings.check {
                    let gpu = device.kernels.gpu();
                    let times = measure(settings, gpu, stream, &line_up, (shape, mask))?;
                    found.measurements.extend(times);
                }
                progress.step();
            }
        }
        Ok(())
    })?;
    let is_empty = match settings.check {
        true => found.checks.is_empty(),
        false => found.measurements.is_empty(),
    };
    if is_empty {
        return Err(GpuBenchError::Nobody);
    }
    Ok(found)
}

/// Who takes part on one workload under one mask, in the order of the table.
struct LineUp<'a> {
    /// None, or one for each choice of what is saved.
    flamia: Vec<Flamia<'a>>,
    peers: Vec<Libtorch<'a>>,
}

/// Makes every system's call, runs it, and compares what comes out.
fn line_up<'a>(
    settings: &Attention,
    device: &Device,
    stream: Stream<'_>,
    operands: &'a Operands,
    checker: &mut Checker,
) -> Result<LineUp<'a>, GpuBenchError> {
    let mask = checker.mask();
    let mut line_up = LineUp {
        flamia: Vec::new(),
        peers: Vec::new(),
    };
    if settings.system.contains(&Entrant::Flamia) {
        for (name, images) in [
            (OURS.to_owned(), SavedImages::One),
            (format!("{OURS}, both images saved"), SavedImages::Both),
        ] {
            let way = Way {
                images,
                ..Way::default()
            };
            match Flamia::new(device, operands, mask, (name, way), stream) {
                // The others may run there.
                Err(GpuBenchError::Call(error @ CallError::Unsupported { .. })) => {
                    tell(operands.shape.name, mask, &error);
                    break;
                }
                made => line_up.flamia.push(made?),
            }
        }
        if let Some(flamia) = line_up.flamia.first() {
            checker.with_cpu(operands, flamia)?;
        }
    }
    for peer in settings.system.iter().filter_map(|entrant| entrant.peer()) {
        let made = match Libtorch::new(device, peer, operands, mask) {
            Err(GpuBenchError::Peer(PeerError::Lengths { .. })) => continue,
            Err(GpuBenchError::Peer(error)) => {
                tell(operands.shape.name, mask, &error);
                continue;
            }
            made => made?,
        };
        match checker.with_others(&made, &line_up.flamia, line_up.peers.first()) {
            // Ours is right, so that the others can be timed.
            Err(error @ GpuBenchError::Wrong { .. }) if !settings.check => {
                tell(operands.shape.name, mask, &error);
            }
            done => {
                done?;
                line_up.peers.push(made);
            }
        }
    }
    Ok(line_up)
}

/// Times all calls that were asked for, in turns.
fn measure(
    settings: &Attention,
    gpu: &Gpu,
    stream: Stream<'_>,
    line_up: &LineUp<'_>,
    (shape, mask): (Shape, Masking),
) -> Result<Vec<Measurement>, GpuBenchError> {
    let ours = line_up.flamia.iter().map(|ours| ours as &dyn Contestant);
    let others = line_up.peers.iter().map(|peer| peer as &dyn Contestant);
    let calls: Vec<_> = ours
        .chain(others)
        .flat_map(|contestant| {
            contestant
                .calls()
                .into_iter()
                .map(move |call| (contestant, call))
        })
        .filter(|(_, call)| settings.pass.contains(&call.pass))
        .collect();
    let times = time(&calls, settings.rounds, gpu, stream)?;
    let measurement = |(&(contestant, call), time): (&(&dyn Contestant, Call), Time)| Measurement {
        shape,
        mask,
        pass: call.pass,
        system: contestant.system(),
        quantisation: call.quantisation,
        ms: time.ms,
        graph: Some(time.is_graph),
        rounds: Some(settings.rounds),
        memory: contestant.memory(call),
        form: contestant.form(call),
        note: contestant.note().to_owned(),
    };
    Ok(calls.iter().zip(times).map(measurement).collect())
}

/// A median, and whether a graph was replayed.
struct Time {
    ms: f64,
    is_graph: bool,
}

/// Times calls in turns, in graphs where they can be captured.
fn time(
    calls: &[(&dyn Contestant, Call)],
    rounds: u32,
    gpu: &Gpu,
    stream: Stream<'_>,
) -> Result<Vec<Time>, GpuBenchError> {
    let warm = |&(contestant, call): &(_, _)| Timed::warm(contestant, call, stream);
    let mut timed = calls.iter().map(warm).collect::<Result<Vec<_>, _>>()?;
    for timed in &mut timed {
        timed.capture(gpu, stream);
    }
    let mut timer = Timer::new(gpu)?;
    let mut take = |contender: usize| timed[contender].ms(&mut timer, stream);
    medians(calls.len(), WARM_UP, &mut take)?;
    let times = medians(calls.len(), rounds, &mut take)?;
    // Graphs are freed below, and nothing of theirs may run any more.
    gpu.synchronize()?;
    let time = |(timed, ms): (&Timed<'_>, f64)| Time {
        ms,
        is_graph: timed.is_graph(),
    };
    Ok(timed.iter().zip(times).map(time).collect())
}

impl Entrant {
    fn peer(self) -> Option<Peer> {
        match self {
            Entrant::Flamia => None,
            Entrant::Fa2 => Some(Peer::Flash),
            Entrant::Cudnn => Some(Peer::Cudnn),
            Entrant::CudnnPacked => Some(Peer::CudnnPacked),
        }
    }
}
