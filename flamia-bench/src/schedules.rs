//! `bench schedules`: how long a GPU takes to build the schedule of a packed row.

use std::time::Instant;

use flamia_cuda::{Buffer, BuildError, CudaStream, Gpu, GpuError, Graph, Timer};
use flamia_probe::progress::Progress;
use flamia_probe::report::version;
use flamia_sched::cuda::{
    Boundary, BuildCall, DeviceSchedule, HostSchedule, ScheduleError, ScheduleKernels,
};
use flamia_sched::{Documents, DocumentsError, Mask};
use serde::Serialize;

/// Time to build the work lists of a packed row, on the GPU and on the host
///
/// Each row of documents is scheduled by a replayed CUDA graph, by launches on a stream, and on the
/// host with a copy of the lists to the GPU, which is what a library does that plans on the CPU. The
/// three take turns; the median of all rounds is reported. Every schedule is first held against the
/// host's, bit for bit, and a wrong one is not timed.
#[derive(Clone, Debug, clap::Args)]
pub struct Schedules {
    /// Rows of the packed row, cut into equal documents
    #[arg(long, value_name = "ROWS", default_value_t = 131_072)]
    pub total: usize,

    /// How many documents the row is cut into, for each measurement
    #[arg(long, value_delimiter = ',', default_value = "1,29,1000,8192,131072")]
    pub documents: Vec<usize>,

    /// causal, full, window:KEYS
    #[arg(long, default_value = "causal")]
    pub mask: Mask,

    /// Times that each is measured
    #[arg(long, default_value_t = 51, value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: u32,

    /// Which GPU, counted from 0
    #[arg(long, default_value_t = 0)]
    pub gpu: usize,
}

/// One way to build the schedule of one row.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// `graph` (replayed), `stream` (launched one by one) or `host` (built there and copied).
    pub system: &'static str,
    /// Documents of the row.
    pub documents: usize,
    /// Entries of `cu_seqlens`: `documents + 1`, or one per row and one more, whatever the
    /// documents.
    pub entries: usize,
    /// Rows of the packed row.
    pub total: usize,
    /// `causal`, `full` or `window:KEYS`.
    pub mask: String,
    /// Items of both passes.
    pub items: usize,
    /// Microseconds, the median of all rounds.
    pub us: f64,
    /// Microseconds of the fastest round.
    pub fastest_us: f64,
    /// Microseconds of `host` as a multiple of these.
    pub times_host: f64,
    /// Kernel launches; those of the host are none.
    pub launches: usize,
    /// Bytes of the buffer that the schedule lies in.
    pub bytes: usize,
    /// Rounds of which this is the median.
    pub rounds: u32,
    /// The GPU's name.
    pub gpu: String,
    /// The newest CUDA that its driver supports.
    pub driver: String,
    /// This package's version and commit.
    pub version: String,
}

/// A measurement that was not made.
#[derive(Debug, thiserror::Error)]
pub enum SchedulesError {
    /// Documents that the row has no rows for, or too many.
    #[error(transparent)]
    Documents(#[from] DocumentsError),
    /// The kernels are not on the GPU.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// The GPU refuses.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// The schedule is not built.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    /// A number of documents that the row cannot be cut into.
    #[error("a row of {total} rows cannot be cut into {documents} documents of at least one row")]
    Cut {
        /// Rows of the row.
        total: usize,
        /// Documents that were asked for.
        documents: usize,
    },
    /// The GPU's schedule is not the host's.
    #[error(
        "the schedule of {documents} documents that the {gpu} built is not the CPU's, so it was not \
         timed; this is a bug to report, with the output of `nvidia-smi`"
    )]
    Wrong {
        /// The GPU's name.
        gpu: String,
        /// Documents of the row.
        documents: usize,
    },
}

/// The ways to build a schedule, in the order of their rows.
const SYSTEMS: [&str; 3] = ["graph", "stream", "host"];

impl Schedules {
    /// Three rows for each number of documents and of entries.
    ///
    /// # Errors
    /// There is no GPU or no compiler, or a schedule is wrong.
    pub fn rows(&self) -> Result<Vec<Row>, SchedulesError> {
        let gpu = Gpu::new(self.gpu)?;
        let kernels = ScheduleKernels::new(&gpu, Boundary::Int32)?;
        // Not the default stream, which cannot be captured.
        let stream = gpu
            .context()
            .new_stream()
            .map_err(|error| GpuError::Driver {
                doing: "make a stream",
                status: format!("{error:?}"),
                text: String::new(),
            })?;
        let progress = Progress::new(2 * self.documents.len());
        let mut rows = Vec::new();
        for &count in &self.documents {
            let documents = equal(self.total, count)?;
            for entries in [count + 1, self.total + 1] {
                progress.at(format_args!("{count} documents in {entries} entries"));
                let subject = Subject {
                    gpu: &gpu,
                    kernels: &kernels,
                    stream: &stream,
                    documents: &documents,
                };
                rows.extend(self.measure(&subject, entries)?);
                progress.step();
            }
        }
        Ok(rows)
    }

    fn measure(&self, subject: &Subject<'_>, entries: usize) -> Result<Vec<Row>, SchedulesError> {
        let Subject {
            gpu,
            kernels,
            stream,
            documents,
        } = *subject;
        let mut cu_seqlens = documents.cu_seqlens().to_vec();
        cu_seqlens.resize(entries, self.total as i32);
        let boundaries = Buffer::from_slice(gpu, &cu_seqlens)?;
        let call = BuildCall::new(boundaries.pointer(), entries, self.mask);
        let mut schedule = DeviceSchedule::new(gpu, self.total)?;
        let layout = *schedule.layout();
        // SAFETY: the buffers outlive the replays, each of which is waited for.
        let mut graph = unsafe {
            Graph::capture(gpu, stream.into(), |stream| {
                schedule.build(kernels, stream, &call)
            })?
        };
        graph.replay(stream.into())?;
        let wanted = HostSchedule::new(documents, &call);
        if schedule.download()? != wanted {
            return Err(SchedulesError::Wrong {
                gpu: gpu.name().to_owned(),
                documents: documents.len(),
            });
        }

        let mut timer = Timer::new(gpu)?;
        let mut copy = Buffer::filled(gpu, layout.bytes, 0)?;
        let mut times = [const { Vec::new() }; SYSTEMS.len()];
        for _ in 0..self.rounds {
            times[0].push(timer.time(stream.into(), |stream| graph.replay(stream))?);
            times[1].push(timer.time(stream.into(), |stream| {
                // SAFETY: the buffers outlive the timer's wait.
                unsafe { schedule.build(kernels, stream, &call) }
            })?);
            let start = Instant::now();
            copy.upload(&HostSchedule::new(documents, &call).to_bytes(&layout))?;
            times[2].push(start.elapsed().as_secs_f64() * 1e6);
        }
        let medians = times.each_mut().map(|times| {
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        });
        let rows = SYSTEMS.iter().zip(&times).zip(medians);
        let row = |((&system, times), us): ((&&'static str, &Vec<f64>), f64)| Row {
            system,
            documents: documents.len(),
            entries,
            total: self.total,
            mask: self.mask.to_string(),
            items: wanted.forward.len() + wanted.backward.len(),
            us,
            fastest_us: times[0],
            times_host: medians[2] / us,
            launches: if system == "host" {
                0
            } else {
                layout.launches()
            },
            bytes: layout.bytes,
            rounds: self.rounds,
            gpu: gpu.name().to_owned(),
            driver: gpu.driver().to_string(),
            version: version(),
        };
        Ok(rows.map(row).collect())
    }
}

/// What is measured, and with what.
struct Subject<'a> {
    gpu: &'a Gpu,
    kernels: &'a ScheduleKernels,
    stream: &'a CudaStream,
    documents: &'a Documents,
}

/// `count` documents of `total` rows in all, their lengths at most one apart.
fn equal(total: usize, count: usize) -> Result<Documents, SchedulesError> {
    if count == 0 || count > total {
        let documents = count;
        return Err(SchedulesError::Cut { total, documents });
    }
    let lengths: Vec<_> = (0..count)
        .map(|index| total / count + usize::from(index < total % count))
        .collect();
    Ok(Documents::from_lengths(&lengths)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_cut_evenly() {
        let documents = equal(10, 4).unwrap();
        assert_eq!(documents.cu_seqlens(), [0, 3, 6, 8, 10]);
        for count in [0, 11] {
            let error = equal(10, count).unwrap_err().to_string();
            assert!(
                error.contains(&format!("into {count} documents")),
                "{error}"
            );
        }
    }
}
