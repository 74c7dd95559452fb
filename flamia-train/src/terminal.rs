//! A run's progress on standard error: a bar for people, sparse lines for logs.

use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressFinish, ProgressStyle};

/// Logs get a line when this share of the steps has passed, or this time.
const LINE_SHARE: f64 = 0.1;
const LINE_TIME: Duration = Duration::from_secs(30);
/// Speed is averaged over about this time, with exponential weights.
const SMOOTHING_S: f64 = 10.0;
/// Short enough that all the numbers fit beside it on 80 columns; what does not fit is cut off.
const TEMPLATE: &str = "{pos}/{len} {bar:16} {wide_msg}";

/// The state of a run on the terminal. Nothing here fails: output that nobody takes is dropped.
pub struct Progress {
    output: Output,
    /// Steps that are done.
    done: usize,
    steps: usize,
    state: State,
    last: Instant,
}

enum Output {
    Bar(ProgressBar),
    Lines {
        writer: Box<dyn Write + Send>,
        cadence: Cadence,
        started: Instant,
    },
}

impl Progress {
    /// Shows a run of `steps` steps of which `done` are done, on standard error.
    #[must_use]
    pub fn new(done: usize, steps: usize) -> Self {
        if io::stderr().is_terminal() {
            Self::bar(done, steps, ProgressDrawTarget::stderr())
        } else {
            Self::lines(done, steps, Box::new(io::stderr()))
        }
    }

    /// Shows nothing: another process shows the run.
    #[must_use]
    pub fn silent(done: usize, steps: usize) -> Self {
        Self::lines(done, steps, Box::new(io::sink()))
    }

    fn bar(done: usize, steps: usize, target: ProgressDrawTarget) -> Self {
        let style = ProgressStyle::with_template(TEMPLATE);
        let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = ProgressBar::with_draw_target(Some(steps as u64), target)
            .with_style(style)
            .with_position(done as u64)
            .with_finish(ProgressFinish::Abandon);
        Self::with_output(Output::Bar(bar), done, steps)
    }

    fn lines(done: usize, steps: usize, writer: Box<dyn Write + Send>) -> Self {
        let cadence = Cadence::new(done, steps);
        Self::with_output(
            Output::Lines {
                writer,
                cadence,
                started: Instant::now(),
            },
            done,
            steps,
        )
    }

    fn with_output(output: Output, done: usize, steps: usize) -> Self {
        Self {
            output,
            done,
            steps,
            state: State::default(),
            last: Instant::now(),
        }
    }

    /// Shows that `step` steps are done, the last with this loss and learning rate, and those since the call
    /// before on this many tokens.
    pub fn step(&mut self, step: usize, loss: f64, lr: f64, tokens: usize) {
        let elapsed = self.last.elapsed();
        self.last = Instant::now();
        self.state.loss = Some(loss);
        self.state.lr = lr;
        let steps = step.saturating_sub(self.done);
        self.done = step;
        self.state.speed.add(steps, tokens, elapsed);
        self.state.remaining = self.steps.saturating_sub(step);
        let state = &self.state;
        match &mut self.output {
            Output::Bar(bar) => {
                bar.set_position(step as u64);
                bar.set_message(state.to_string());
            }
            Output::Lines {
                writer,
                cadence,
                started,
            } => {
                if cadence.due(step, started.elapsed()) {
                    let _ = writeln!(writer, "step {step}/{} {state}", self.steps);
                }
            }
        }
    }

    /// Shows that so many steps were left out, from the next step on.
    pub fn skipped(&mut self, steps: u64) {
        self.state.skipped = steps;
    }

    /// Shows the validation loss from now on.
    pub fn validation(&mut self, loss: f64) {
        self.state.val_loss = Some(loss);
        if let Output::Bar(bar) = &self.output {
            bar.set_message(self.state.to_string());
        }
        // The time of an evaluation is no step's time.
        self.last = Instant::now();
    }

    /// Prints `text` above the bar.
    pub fn note(&mut self, text: &str) {
        match &mut self.output {
            Output::Bar(bar) => bar.println(text),
            Output::Lines { writer, .. } => {
                let _ = writeln!(writer, "{text}");
            }
        }
    }

    /// Prints a warning above the bar.
    pub fn warn(&mut self, text: &str) {
        self.note(&format!("warning: {text}"));
    }

    /// Leaves the bar as it is; what is printed next stands below it.
    pub fn finish(self) {
        if let Output::Bar(bar) = self.output {
            bar.abandon();
        }
    }
}

/// The numbers shown.
#[derive(Default)]
struct State {
    skipped: u64,
    loss: Option<f64>,
    val_loss: Option<f64>,
    lr: f64,
    speed: Speed,
    remaining: usize,
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        if self.skipped > 0 {
            parts.push(format!("skipped {}", self.skipped));
        }
        if let Some(loss) = self.loss {
            parts.push(format!("loss {loss:.3}"));
        }
        if let Some(loss) = self.val_loss {
            parts.push(format!("val {loss:.3}"));
        }
        if self.loss.is_some() {
            parts.push(format!("lr {:.1e}", self.lr));
            parts.push(format!("{} tok/s", short(self.speed.tokens_per_s())));
            let eta = self.remaining as f64 * self.speed.seconds_per_step();
            parts.push(format!("ETA {}", clock(eta)));
        }
        f.write_str(&parts.join(" "))
    }
}

/// Averages over the steps of about the last [`SMOOTHING_S`] seconds.
#[derive(Default)]
struct Speed {
    tokens: f64,
    steps: f64,
    seconds: f64,
}

impl Speed {
    fn add(&mut self, steps: usize, tokens: usize, elapsed: Duration) {
        let elapsed = elapsed.as_secs_f64();
        let kept = (-elapsed / SMOOTHING_S).exp();
        self.tokens = kept * self.tokens + tokens as f64;
        self.steps = kept * self.steps + steps as f64;
        self.seconds = kept * self.seconds + elapsed;
    }

    fn tokens_per_s(&self) -> f64 {
        if self.seconds > 0.0 {
            self.tokens / self.seconds
        } else {
            0.0
        }
    }

    fn seconds_per_step(&self) -> f64 {
        if self.steps > 0.0 {
            self.seconds / self.steps
        } else {
            0.0
        }
    }
}

/// When a log gets its next line.
struct Cadence {
    steps: usize,
    last_step: usize,
    last_time: Duration,
}

impl Cadence {
    fn new(done: usize, steps: usize) -> Self {
        Self {
            steps,
            last_step: done,
            last_time: Duration::ZERO,
        }
    }

    fn due(&mut self, step: usize, elapsed: Duration) -> bool {
        let share = |step: usize| (step as f64 / (LINE_SHARE * self.steps as f64)).floor();
        let due = share(step) > share(self.last_step)
            || step >= self.steps
            || elapsed.saturating_sub(self.last_time) >= LINE_TIME;
        if due {
            self.last_step = step;
            self.last_time = elapsed;
        }
        due
    }
}

/// A rate in a few characters: 873, 8.1k, 1.3M.
fn short(rate: f64) -> String {
    match rate {
        r if r >= 1e6 => format!("{:.1}M", r / 1e6),
        r if r >= 1e3 => format!("{:.1}k", r / 1e3),
        r => format!("{r:.0}"),
    }
}

/// Seconds as m:ss or h:mm:ss.
fn clock(seconds: f64) -> String {
    // The cast saturates: an absurd estimate shows as very long.
    let s = seconds.round() as u64;
    match s / 3600 {
        0 => format!("{}:{:02}", s / 60, s % 60),
        h => format!("{h}:{:02}:{:02}", s / 60 % 60, s % 60),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use indicatif::TermLike;

    use super::*;

    /// A terminal of some width that keeps all that was written.
    #[derive(Debug, Clone)]
    struct Screen {
        columns: u16,
        written: Arc<Mutex<String>>,
    }

    impl Screen {
        fn new(columns: u16) -> Self {
            Self {
                columns,
                written: Arc::default(),
            }
        }

        fn text(&self) -> String {
            self.written.lock().unwrap().clone()
        }
    }

    impl TermLike for Screen {
        fn width(&self) -> u16 {
            self.columns
        }
        fn move_cursor_up(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_down(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_right(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_left(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn write_line(&self, s: &str) -> io::Result<()> {
            self.write_str(&format!("{s}\n"))
        }
        fn write_str(&self, s: &str) -> io::Result<()> {
            self.written.lock().unwrap().push_str(s);
            Ok(())
        }
        fn clear_line(&self) -> io::Result<()> {
            self.write_str("\r")
        }
        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Write for Screen {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.written
                .lock()
                .unwrap()
                .push_str(std::str::from_utf8(bytes).unwrap());
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn run(mut progress: Progress) {
        progress.validation(5.6);
        for step in 1..=300 {
            progress.step(step, 5.6 - step as f64 / 100.0, 2e-3, 4096);
            if step == 150 {
                progress.validation(4.25);
                progress.warn("the disk is full");
            }
        }
        progress.finish();
    }

    #[test]
    fn a_bar_shows_the_numbers_and_warnings_on_80_columns() {
        let screen = Screen::new(80);
        let target = ProgressDrawTarget::term_like_with_hz(Box::new(screen.clone()), 255);
        run(Progress::bar(0, 300, target));
        let text = screen.text();
        assert!(text.contains("warning: the disk is full"), "{text}");
        let last = text
            .rsplit(['\r', '\n'])
            .find(|line| line.contains("300/300"))
            .unwrap();
        assert!(last.contains("loss 2.600 val 4.250 lr 2.0e-3 "), "{last}");
        assert!(last.contains("tok/s ETA 0:00"), "{last}");
    }

    #[test]
    fn no_terminal_is_too_narrow() {
        // A terminal that does not know its width counts as 80 columns, so that 0 does not occur.
        for columns in [1, 2, 7, 8, 20, 30] {
            let screen = Screen::new(columns);
            let target = ProgressDrawTarget::term_like_with_hz(Box::new(screen.clone()), 255);
            run(Progress::bar(0, 300, target));
            assert!(!screen.text().is_empty(), "{columns} columns");
        }
    }

    #[test]
    fn a_log_gets_a_line_every_tenth_of_the_steps() {
        let screen = Screen::new(0);
        run(Progress::lines(0, 300, Box::new(screen.clone())));
        let text = screen.text();
        let steps = text.lines().filter_map(|line| line.strip_prefix("step "));
        let steps: Vec<_> = steps.map(|line| line.split_once('/').unwrap().0).collect();
        assert_eq!(
            steps,
            [
                "30", "60", "90", "120", "150", "180", "210", "240", "270", "300"
            ]
        );
        assert!(text.contains("\nwarning: the disk is full\n"), "{text}");
        assert!(
            text.contains("step 150/300 loss 4.100 val 5.600 lr 2.0e-3 "),
            "{text}"
        );
        assert!(!text.contains('\r') && !text.contains('\u{1b}'), "{text:?}");
    }

    #[test]
    fn steps_that_were_left_out_are_shown_first() {
        let screen = Screen::new(0);
        let mut progress = Progress::lines(0, 10, Box::new(screen.clone()));
        progress.step(1, 5.5, 2e-3, 4096);
        progress.skipped(2);
        progress.step(2, f64::NAN, 2e-3, 4096);
        let text = screen.text();
        assert!(text.starts_with("step 1/10 loss 5.500 "), "{text}");
        assert!(text.contains("step 2/10 skipped 2 loss NaN "), "{text}");
    }

    #[test]
    fn a_slow_log_gets_a_line_every_half_minute() {
        let mut cadence = Cadence::new(500, 1000);
        let mut due =
            |step: usize| cadence.due(step, Duration::from_secs(10 * (step as u64 - 500)));
        let lines: Vec<_> = (501..=510).filter(|&step| due(step)).collect();
        assert_eq!(lines, [503, 506, 509]);
    }

    #[test]
    fn runs_without_steps_or_resumed_at_the_end_do_not_trip() {
        for (done, steps) in [(0, 0), (300, 300), (301, 300)] {
            let screen = Screen::new(0);
            let mut progress = Progress::lines(done, steps, Box::new(screen.clone()));
            progress.note("nothing left to do");
            progress.step(done + 1, f64::NAN, 0.0, 0);
            progress.finish();
            assert!(screen.text().starts_with("nothing left to do\n"));
        }
    }

    #[test]
    fn speed_follows_the_last_steps() {
        let mut speed = Speed::default();
        assert_eq!((speed.tokens_per_s(), speed.seconds_per_step()), (0.0, 0.0));
        for _ in 0..100 {
            speed.add(2, 1000, Duration::from_secs(10));
        }
        assert!((speed.tokens_per_s() - 100.0).abs() < 1e-9);
        assert!((speed.seconds_per_step() - 5.0).abs() < 1e-9);
        for _ in 0..100 {
            speed.add(1, 1000, Duration::from_secs(1));
        }
        assert!((speed.tokens_per_s() - 1000.0).abs() < 1.0);
        assert!((speed.seconds_per_step() - 1.0).abs() < 1e-3);
    }

    /// On a GPU, nobody looks at a step between two points of the log.
    #[test]
    fn steps_that_were_not_shown_count_in_the_estimate() {
        for done in [0, 500] {
            let screen = Screen::new(0);
            let mut progress = Progress::lines(done, 2000, Box::new(screen.clone()));
            for step in (done + 10..=1800).step_by(10) {
                // Ten steps of 21.5 ms.
                progress.last -= Duration::from_millis(215);
                progress.step(step, 1.3, 6e-4, 10 * 8192);
            }
            let text = screen.text();
            let last = text.lines().last().unwrap();
            // 200 steps of 21.5 ms are left.
            assert!(last.starts_with("step 1800/2000 "), "{last}");
            assert!(last.ends_with(" tok/s ETA 0:04"), "{last}");
        }
    }

    #[test]
    fn rates_and_times_are_short() {
        assert_eq!([873.4, 8123.0, 1.26e6].map(short), ["873", "8.1k", "1.3M"]);
        assert_eq!([0.0, 133.2, 3733.0].map(clock), ["0:00", "2:13", "1:02:13"]);
    }
}
