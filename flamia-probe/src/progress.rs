//! A bar on standard error while a probe works.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// The work done so far. Drawn only on a terminal, and only when the work takes a while.
pub struct Progress(ProgressBar);

impl Progress {
    /// A bar of `steps` steps.
    pub fn new(steps: usize) -> Self {
        let style = ProgressStyle::with_template("{pos}/{len} {bar:24} {elapsed} {wide_msg}");
        let bar = ProgressBar::with_draw_target(
            Some(steps as u64),
            // Twice a second: what is quicker leaves no trace.
            ProgressDrawTarget::stderr_with_hz(2),
        )
        .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.enable_steady_tick(Duration::from_secs(1));
        Self(bar)
    }

    /// Says what is being worked on.
    pub fn at(&self, what: impl std::fmt::Display) {
        self.0.set_message(what.to_string());
    }

    /// One step more is done.
    pub fn step(&self) {
        self.0.inc(1);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
