//! Policies by name.

use std::num::NonZero;

use clap::ValueEnum;
use flamia_sched::simulate::{Assignment, Order, Policy, Request};
use flamia_sched::work::{BackwardLaunch, HeadSections, Pass};

/// A schedule by its order and assignment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Schedule {
    /// As a plain grid numbers them, CTA i of n does items i, n + i, 2n + i, …
    InputStrided,
    /// The same order, every other run of n items backwards
    InputAlternating,
    /// The same order, the free CTA takes the next item
    InputDynamic,
    /// FlashAttention-4's order: longest first within a document, documents as they come; strided
    Fa4Strided,
    /// The same order, alternating
    Fa4Alternating,
    /// The same order, dynamic
    Fa4Dynamic,
    /// Longest first over all documents; strided
    LongestStrided,
    /// The same order, alternating
    LongestAlternating,
    /// The same order, dynamic
    LongestDynamic,
    /// The same, each CTA reserving its next item as it starts one
    LongestPremature,
    /// The same order, one CTA per item on a capped grid, then a persistent launch (backward only)
    LongestLaunches,
}

/// How CTAs acquire items dynamically.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub struct Acquire {
    /// Time from a request for the next item to its start
    #[arg(long, value_name = "TIME", default_value_t = 0.0, value_parser = time)]
    pub latency: f64,

    /// How long before the end of its item a CTA asks for the next one
    #[arg(long, value_name = "TIME", default_value_t = 0.0, value_parser = time)]
    pub lead: f64,
}

/// A time that a simulation can take.
pub fn time(text: &str) -> Result<f64, &'static str> {
    let time = text.parse().ok();
    time.filter(|time: &f64| time.is_finite() && *time >= 0.0)
        .ok_or("use a number that is not negative")
}

impl Schedule {
    /// The name on the command line.
    pub fn name(self) -> String {
        let value = self.to_possible_value();
        value.map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// Whether the pass can be scheduled like this.
    pub fn fits(self, pass: Pass) -> bool {
        self != Self::LongestLaunches || pass == Pass::Backward
    }

    /// The schedule for a packed row of `total` rows. Where nothing is said of sections, a plain
    /// grid goes through the heads one by one, and the other orders keep all together.
    pub fn policy(
        self,
        heads: NonZero<usize>,
        per_section: Option<NonZero<usize>>,
        acquire: &Acquire,
        total: usize,
        sms: usize,
    ) -> Policy {
        use Schedule::*;
        let order = match self {
            InputStrided | InputAlternating | InputDynamic => Order::Input,
            Fa4Strided | Fa4Alternating | Fa4Dynamic => Order::LongestFirstInDocuments,
            LongestStrided | LongestAlternating | LongestDynamic | LongestPremature
            | LongestLaunches => Order::LongestFirst,
        };
        let dynamic = |request| Assignment::Dynamic {
            request,
            latency: acquire.latency,
        };
        let assignment = match self {
            InputStrided | Fa4Strided | LongestStrided => Assignment::Strided,
            InputAlternating | Fa4Alternating | LongestAlternating => Assignment::Alternating,
            InputDynamic | Fa4Dynamic | LongestDynamic => dynamic(Request::BeforeEnd(acquire.lead)),
            LongestPremature => dynamic(Request::AtStart),
            LongestLaunches => {
                Assignment::Launches(BackwardLaunch::for_row(total, heads.get(), sms))
            }
        };
        let by_default = match order {
            Order::Input => NonZero::<usize>::MIN,
            Order::LongestFirstInDocuments | Order::LongestFirst => heads,
        };
        Policy {
            order,
            sections: HeadSections::new(heads, per_section.unwrap_or(by_default)),
            assignment,
        }
    }
}
