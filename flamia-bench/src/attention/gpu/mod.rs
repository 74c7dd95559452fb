//! What runs on the GPU: operands, systems, comparisons and the clock.

mod check;
mod contestant;
mod error;
mod flamia;
mod libtorch;
mod operands;

use flamia_autograd::peers::{Peer, PeerError};
use flamia_autograd::{TorchStream, load_cuda, torch_version};
use flamia_cuda::{Gpu, Stream, Timer};
use flamia_kernels::cuda::call::{CallError, Kernels, SavedImages};
use flamia_probe::progress::Progress;
use flamia_probe::report::commit;

use self::check::{Check, Checker};
use self::contestant::{Contestant, Timed};
pub use self::error::GpuBenchError;
use self::flamia::Flamia;
pub use self::flamia::NAME as OURS;
use self::libtorch::{Libtorch, tell};
use self::operands::{Device, Operands};
use super::rounds::medians;
use super::row::{Masking, Measurement, Setting};
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

/// Compares, and unless comparing is all that was asked for, times.
pub fn run(settings: &Attention) -> Result<Found, GpuBenchError> {
    if !load_cuda()? {
        return Err(GpuBenchError::NoGpu);
    }
    let gpu = Gpu::new(settings.gpu)?;
    // Such a GPU exists, so that its number is small.
    let ordinal = i32::try_from(settings.gpu).unwrap_or(i32::MAX);
    let device = Device {
        torch: tch::Device::Cuda(settings.gpu),
        ordinal,
        kernels: Kernels::new(gpu),
    };
    let stream = TorchStream::new(ordinal)?;
    let mut found = Found {
        checks: Vec::new(),
        measurements: Vec::new(),
        setting: Setting {
            gpu: device.kernels.gpu().name().to_owned(),
            driver: device.kernels.gpu().driver().to_string(),
            torch: torch_version().to_owned(),
            commit: commit().map(str::to_owned),
        },
    };
    let shapes = settings.shapes();
    let progress = Progress::new(shapes.len() * settings.mask.len());
    stream.run(|| -> Result<(), GpuBenchError> {
        // SAFETY: torch keeps its streams.
        let raw = unsafe { Stream::from_raw(stream.as_raw()) };
        for shape in shapes {
            let operands = Operands::draw(&device, shape)?;
            for &mask in &settings.mask {
                progress.at(format_args!("{}, {mask}", shape.name));
                let mut checker = Checker::new(shape, mask);
                let line_up = line_up(settings, &device, raw, &operands, &mut checker)?;
                found.checks.extend(checker.checks);
                if !settings.check {
                    let gpu = device.kernels.gpu();
                    let times = time(settings, gpu, raw, &line_up, (shape, mask))?;
                    found.measurements.extend(times);
                }
                progress.step();
            }
        }
        Ok(())
    })??;
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
        for images in [SavedImages::One, SavedImages::Both] {
            match Flamia::new(device, operands, mask, images, stream) {
                // The others may run there.
                Err(GpuBenchError::Call(error @ CallError::Unsupported { .. })) => {
                    tell(operands, mask, &error);
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
                tell(operands, mask, &error);
                continue;
            }
            made => made?,
        };
        match checker.with_others(&made, &line_up.flamia, line_up.peers.first()) {
            // Ours is right, so that the others can be timed.
            Err(error @ GpuBenchError::Wrong { .. }) if !settings.check => {
                tell(operands, mask, &error);
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
fn time(
    settings: &Attention,
    gpu: &Gpu,
    stream: Stream<'_>,
    line_up: &LineUp<'_>,
    (shape, mask): (Shape, Masking),
) -> Result<Vec<Measurement>, GpuBenchError> {
    let ours = line_up.flamia.iter().map(|ours| ours as &dyn Contestant);
    let others = line_up.peers.iter().map(|peer| peer as &dyn Contestant);
    let mut timed = Vec::new();
    for contestant in ours.chain(others) {
        for call in contestant.calls() {
            if settings.pass.contains(&call.pass) {
                timed.push(Timed::warm(contestant, call, stream)?);
            }
        }
    }
    for timed in &mut timed {
        timed.capture(gpu, stream);
    }
    let mut timer = Timer::new(gpu)?;
    let count = timed.len();
    let mut take = |contender: usize| timed[contender].ms(&mut timer, stream);
    medians(count, WARM_UP, &mut take)?;
    let times = medians(count, settings.rounds, &mut take)?;
    // Graphs are freed below, and nothing of theirs may run any more.
    gpu.synchronize()?;
    let measurement = |(timed, ms): (&Timed<'_>, f64)| {
        let (contestant, call) = (timed.contestant(), timed.call());
        Measurement {
            shape,
            mask,
            pass: call.pass,
            system: contestant.system(),
            quantisation: call.quantisation,
            ms,
            graph: Some(timed.is_graph()),
            rounds: Some(settings.rounds),
            memory: contestant.memory(call),
            note: contestant.note().to_owned(),
        }
    };
    Ok(timed.iter().zip(times).map(measurement).collect())
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
