//! A preparation's progress on standard error: a bar for people, sparse lines for logs.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use crate::prepare::Progress;

/// Time between lines of a log.
const LINE_TIME: Duration = Duration::from_secs(10);
const STEPS: u64 = 1000;

/// Shows how far a preparation has come. Nothing is shown before the first [`ProgressLine::show`],
/// so nothing at all for a cache that is there.
pub struct ProgressLine {
    bar: Option<ProgressBar>,
    start: Instant,
    /// When something was shown first, and what: a resumed preparation does not begin at 0.
    first: Option<Progress>,
    last_line: Instant,
}

impl Default for ProgressLine {
    fn default() -> Self {
        Self::new()
    }
}

impl ProgressLine {
    /// On standard error.
    #[must_use]
    pub fn new() -> Self {
        let style = ProgressStyle::with_template("{percent:>3} % {bar:16} {wide_msg}");
        let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = || ProgressBar::new(STEPS).with_style(style);
        Self {
            bar: std::io::stderr().is_terminal().then(bar),
            start: Instant::now(),
            first: None,
            last_line: Instant::now(),
        }
    }

    /// Shows documents, tokens, megabytes a second and the time left.
    pub fn show(&mut self, progress: Progress) {
        let first = *self.first.get_or_insert(Progress {
            share: 0.0,
            ..progress
        });
        let line = words(first, progress, self.start.elapsed());
        match &self.bar {
            Some(bar) => {
                bar.set_position((progress.share * STEPS as f64) as u64);
                bar.set_message(line);
            }
            None if self.last_line.elapsed() >= LINE_TIME => {
                eprintln!("{:.0} % {line}", 100.0 * progress.share);
                self.last_line = Instant::now();
            }
            None => {}
        }
    }

    /// Clears the bar.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Documents, tokens, speed and the time left.
fn words(first: Progress, now: Progress, elapsed: Duration) -> String {
    let seconds = elapsed.as_secs_f64().max(1e-3);
    let megabytes = (now.text_bytes - first.text_bytes) as f64 / 1e6;
    let left = seconds * (1.0 - now.share) / (now.share - first.share).max(1e-6);
    format!(
        "{} documents, {:.1} M tokens, {:.1} MB/s, {} left",
        now.documents,
        now.tokens as f64 / 1e6,
        megabytes / seconds,
        indicatif::HumanDuration(Duration::from_secs_f64(left.min(1e8))),
    )
}
