//! Our own call with one optimisation after another left out.

use flamia_cuda::Stream;
use flamia_kernels::cuda::call::FormChoice;
use flamia_probe::progress::Progress;

use super::check::Checker;
use super::contestant::{Call, Contestant};
use super::error::GpuBenchError;
use super::flamia::{Flamia, NAME};
use super::operands::{Device, Operands};
use super::{Session, time};
use crate::ablate::row::Timing;
use crate::ablate::{Ablate, Pass, Without};
use crate::attention::row::{Masking, Quantisation, Setting};
use crate::attention::way::Way;

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

/// What is left out of a call, and what it is of.
type Told = (Option<Without>, Pass, Option<FormChoice>);

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
    let by_rule = Way::default().form(&shape, Masking::Causal).form;
    let shows = |without: Without, pass| without.shows_in(pass, by_rule);
    let mut ablated = Vec::new();
    for &without in &settings.without {
        if !settings.pass.iter().any(|&pass| shows(without, pass)) {
            continue;
        }
        let other = make(format!("{NAME} without {without}"), without.way())?;
        checker.with_own(&other, &whole)?;
        ablated.push((without, other));
    }
    let mut calls: Vec<(&dyn Contestant, Call)> = Vec::new();
    let mut told: Vec<Told> = Vec::new();
    for &pass in &settings.pass {
        let call = Call {
            pass: pass.into(),
            quantisation: Some(Quantisation::In),
        };
        calls.push((&whole, call));
        told.push((None, pass, whole.form(call)));
        for (without, other) in &ablated {
            if shows(*without, pass) {
                calls.push((other, call));
                told.push((Some(*without), pass, other.form(call)));
            }
        }
    }
    let times = time(&calls, settings.rounds, device.kernels.gpu(), stream)?;
    let timing = |((without, pass, form), time): (Told, super::Time)| Timing {
        shape,
        pass,
        without,
        form: form.map(|choice| choice.form),
        ms: time.ms,
        graph: time.is_graph,
        rounds: settings.rounds,
    };
    Ok(told.into_iter().zip(times).map(timing).collect())
}
