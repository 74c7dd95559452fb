//! pip's output line by line, and its display.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use crate::process::say;

/// What one line of `pip install --progress-bar raw` tells.
#[derive(Debug, PartialEq, Eq)]
pub enum Line<'a> {
    /// Bytes of the current download.
    Progress { done: u64, total: u64 },
    /// A wheel is being fetched; `size` as pip puts it, such as `530.6 MB`.
    Downloading { file: &'a str, size: &'a str },
    /// The wheels are being unpacked.
    Installing { packages: &'a str },
    /// Any other line, blank or not.
    Other,
}

impl<'a> Line<'a> {
    pub fn parse(line: &'a str) -> Self {
        let line = line.trim();
        if let Some(numbers) = line.strip_prefix("Progress ") {
            let parsed = numbers
                .split_once(" of ")
                .map(|(done, total)| (done.parse(), total.parse()));
            if let Some((Ok(done), Ok(total))) = parsed {
                return Self::Progress { done, total };
            }
        }
        if let Some(packages) = line.strip_prefix("Installing collected packages: ") {
            return Self::Installing { packages };
        }
        let fetched = ["Downloading ", "Using cached "];
        if let Some(rest) = fetched.iter().find_map(|start| line.strip_prefix(start)) {
            let (file, size) = rest.split_once(" (").unwrap_or((rest, ""));
            // Given by URL or by metadata file, what counts is the last part.
            let file = file.rsplit('/').next().unwrap_or(file);
            let size = size.trim_end_matches(')');
            return Self::Downloading { file, size };
        }
        Self::Other
    }
}

/// A bar per download on a terminal, a line per download elsewhere.
pub struct Display {
    bar: ProgressBar,
}

impl Display {
    pub fn new() -> Self {
        let bar = ProgressBar::new_spinner();
        bar.set_style(spinner());
        bar.set_message("asking pip");
        bar.enable_steady_tick(Duration::from_millis(120));
        Self { bar }
    }

    pub fn show(&mut self, line: &Line) {
        match *line {
            Line::Progress { done, total } => {
                if self.bar.length() != Some(total) || done == 0 {
                    self.bar.set_style(download());
                    self.bar.set_length(total);
                    self.bar.reset();
                }
                self.bar.set_position(done);
            }
            Line::Downloading { file, size } => {
                let package = file.split('-').next().unwrap_or(file);
                self.step(format!("{package} ({size})"));
            }
            Line::Installing { packages } => {
                let count = packages.split(", ").count();
                self.step(format!(
                    "unpacking {count} package{}",
                    if count == 1 { "" } else { "s" }
                ));
            }
            Line::Other => {}
        }
    }

    fn step(&self, message: String) {
        if self.bar.is_hidden() {
            say(&message);
        }
        self.bar.set_style(spinner());
        self.bar.set_message(message);
    }

    pub fn clear(self) {
        self.bar.finish_and_clear();
    }
}

fn spinner() -> ProgressStyle {
    style("  {spinner} {msg}  {elapsed}")
}

fn download() -> ProgressStyle {
    style("  {msg:<40!} [{wide_bar:.cyan}] {bytes}/{total_bytes} {bytes_per_sec} {eta}")
}

fn style(template: &str) -> ProgressStyle {
    // The templates are the two constants above, which a test parses.
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_pip_prints() {
        let cases = [
            (
                "Progress 262144 of 530604548",
                Line::Progress {
                    done: 262_144,
                    total: 530_604_548,
                },
            ),
            (
                "  Downloading torch-2.11.0-cp311-cp311-manylinux_2_28_x86_64.whl (530.6 MB)",
                Line::Downloading {
                    file: "torch-2.11.0-cp311-cp311-manylinux_2_28_x86_64.whl",
                    size: "530.6 MB",
                },
            ),
            (
                "Using cached numpy-2.4.6-cp311-cp311-manylinux_2_27_x86_64.whl (16.9 MB)",
                Line::Downloading {
                    file: "numpy-2.4.6-cp311-cp311-manylinux_2_27_x86_64.whl",
                    size: "16.9 MB",
                },
            ),
            (
                "  Downloading http://index.example/whl/cpu/torch-2.11.0%2Bcpu-cp311.whl (188 MB)",
                Line::Downloading {
                    file: "torch-2.11.0%2Bcpu-cp311.whl",
                    size: "188 MB",
                },
            ),
            (
                "Installing collected packages: cuda-toolkit, nvidia-cuda-runtime\r",
                Line::Installing {
                    packages: "cuda-toolkit, nvidia-cuda-runtime",
                },
            ),
            ("Progress of a kind", Line::Other),
            ("Progress 1 of many", Line::Other),
            ("Collecting torch==2.11.0", Line::Other),
            ("", Line::Other),
        ];
        for (text, line) in cases {
            assert_eq!(Line::parse(text), line, "{text:?}");
        }
    }

    #[test]
    fn the_templates_are_valid() {
        for template in [
            "  {spinner} {msg}  {elapsed}",
            "  {msg:<40!} [{wide_bar:.cyan}] {bytes}/{total_bytes} {bytes_per_sec} {eta}",
        ] {
            ProgressStyle::with_template(template).unwrap();
        }
    }

    #[test]
    fn the_bar_follows_one_download_after_another() {
        let mut display = Display::new();
        display.show(&Line::Progress {
            done: 0,
            total: 100,
        });
        display.show(&Line::Progress {
            done: 60,
            total: 100,
        });
        assert_eq!(
            (display.bar.position(), display.bar.length()),
            (60, Some(100))
        );
        display.show(&Line::Downloading {
            file: "b-1.whl",
            size: "7 MB",
        });
        display.show(&Line::Progress { done: 5, total: 7 });
        assert_eq!((display.bar.position(), display.bar.length()), (5, Some(7)));
    }
}
