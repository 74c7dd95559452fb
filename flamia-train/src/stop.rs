//! Ctrl-C: once to finish the step, save and leave; twice to leave at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The exit code of a run that was stopped before its last step, as shells give it for SIGINT.
pub const STOPPED: u8 = 130;

/// Whether the run has been asked to stop.
#[derive(Debug, Clone, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// Listens to SIGINT, SIGTERM and SIGHUP for the rest of the process's life. The first asks the
    /// run to stop, the second ends the process with code [`STOPPED`].
    ///
    /// # Errors
    /// When the process already listens to them.
    pub fn on_signals() -> Result<Self, ctrlc::Error> {
        let stop = Self::default();
        let asked = stop.clone();
        ctrlc::set_handler(move || {
            if asked.ask() {
                leave(STOPPED);
            }
            eprintln!("\nstopping after this step and saving; once more to stop at once");
        })?;
        Ok(stop)
    }

    /// Asks the run to stop; says whether it had been asked before.
    pub fn ask(&self) -> bool {
        self.0.swap(true, Ordering::Relaxed)
    }

    /// Whether the run has been asked to stop.
    pub fn asked(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Ends the process as it stands. Destructors, which `std::process::exit` runs beside the thread that is
/// still training, would take CUDA down under it; what is on disk is whole at any moment.
pub(crate) fn leave(code: u8) -> ! {
    // SAFETY: it takes nothing, and is made for signal handlers.
    unsafe { libc::_exit(code.into()) }
}
