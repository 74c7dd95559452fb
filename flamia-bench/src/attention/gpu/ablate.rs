//! Our own call with one optimisation after another left out.

use flamia_probe::progress::Progress;

use super::check::Checker;
use super::contestant::{Call, Contestant};
use super::error::GpuBenchError;
use super::flamia::{Flamia, NAME};
use super::operands::{Device, Operands};
use super::{Session, time};
use crate::ablate::row::Timing;
use crate::ablate::{Ablate, Without};
use crate::attention::row::{Masking, Quantisation, Setting};
use crate::attention::way::Way;
use flamia_cuda::Stream;

/// The call as it is, then without each of what was asked for, on every workload that was.
pub fn run(settings: &Ablate) -> Result<(Vec<Timing>, Setting), GpuBenchError> {
    let session = Session::open(settings.gpu)?;
    let shapes = settings.shapes();
    let progress = Progress::new(shapes.len());
    let mut timings = Vec::new();
    session.run(|stream| {
        for shape in shapes {
            progress.at(shape.name);
            let operands = Operands::draw(&session.device, shape)?;
            timings.extend(on(settings, &session.device, &operands, stream)?);
            progress.step();
        }
        Ok(())
    })?;
    Ok((timings, session.setting))
}

/// On one workload.
fn on(
    settings: &Ablate,
    device: &Device,
    operands: &Operands,
    stream: Stream<'_>,
) -> Result<Vec<Timing>, GpuBenchError> {
    let shape = operands.shape;
    let make = |name, way| Flamia::new(device, operands, Masking::Causal, (name, way), stream);
    let whole = make(NAME.to_owned(), Way::default())?;
    let mut checker = Checker::new(shape, Masking::Causal);
    let mut ablated = Vec::new();
    for &without in &settings.without {
        let other = make(format!("{NAME} without {without}"), without.way())?;
        checker.with_own(&other, &whole)?;
        ablated.push((without, other));
    }
    let mut calls: Vec<(&dyn Contestant, Call)> = Vec::new();
    let mut told: Vec<(Option<Without>, _)> = Vec::new();
    for &pass in &settings.pass {
        let call = Call {
            pass: pass.into(),
            quantisation: Some(Quantisation::In),
        };
        calls.push((&whole, call));
        told.push((None, pass));
        for (without, other) in &ablated {
            if without.shows_in(pass) {
                calls.push((other, call));
                told.push((Some(*without), pass));
            }
        }
    }
    let times = time(&calls, settings.rounds, device.kernels.gpu(), stream)?;
    let timing = |((without, pass), time): ((Option<Without>, _), super::Time)| Timing {
        shape,
        pass,
        without,
        ms: time.ms,
        graph: time.is_graph,
        rounds: settings.rounds,
    };
    Ok(told.into_iter().zip(times).map(timing).collect())
}
