//! `sched simulate`: policies side by side.

use std::num::NonZero;
use std::path::PathBuf;

use clap::ValueEnum;
use flamia_probe::report::version;
use flamia_sched::simulate::{Cost, Timeline, simulate};
use flamia_sched::work::{HeadSections, Pass, Tiling};
use flamia_sched::{Documents, Mask, TILE};
use serde::Serialize;

use super::SchedError;
use super::policy::{Acquire, Schedule, time};
use super::ranks::Batch;
use super::source::{Lengths, Source};

/// Simulate how long schedules of the attention passes take
///
/// For every row of documents and number of SMs, each policy's makespan, the bound that no schedule
/// goes below (all work shared equally, or the longest item), their ratio and the share of time that
/// SMs idle. Nothing is measured: an item costs what --cost says, whatever else the GPU does. With
/// --ranks, documents are packed into rows instead, and rows shared among data-parallel ranks.
#[derive(Clone, Debug, clap::Args)]
pub struct Simulate {
    /// Documents to schedule.
    #[command(flatten)]
    pub source: Source,

    /// causal, full, window:KEYS
    #[arg(long, default_value = "causal")]
    pub mask: Mask,

    /// Which pass
    #[arg(long, value_enum, default_value_t = PassName::Forward)]
    pub pass: PassName,

    /// Query heads [default: the workload's, else 16]
    #[arg(long, value_name = "N")]
    pub heads: Option<NonZero<usize>>,

    /// Key/value heads, which --l2-mib keeps in groups [default: the workload's, else 16]
    #[arg(long, value_name = "N")]
    pub kv_heads: Option<NonZero<usize>>,

    /// Heads of a section, which come before the next ones [default: all, `input-*` 1]
    #[arg(long, value_name = "N")]
    pub heads_per_section: Option<NonZero<usize>>,

    /// Sections of as many heads as fit so much L2 cache, 8-bit operands of 128 features assumed
    #[arg(long, value_name = "MIB", conflicts_with = "heads_per_section")]
    pub l2_mib: Option<usize>,

    /// Rows of an item [default: 256 forward, 128 backward; 128 under --cost hopper]
    #[arg(long, value_name = "N")]
    pub item_rows: Option<NonZero<usize>>,

    /// SMs of the GPU, each running one CTA at a time
    #[arg(
        long,
        value_name = "NUMBERS",
        value_delimiter = ',',
        default_value = "132,148"
    )]
    pub sms: Vec<NonZero<usize>>,

    /// What an item costs
    #[arg(long, value_enum, default_value_t = CostName::Unit)]
    pub cost: CostName,

    /// Time of a block of 128 keys or queries, instead of what --cost says
    #[arg(long, value_name = "US", value_parser = time)]
    pub per_block_us: Option<f64>,

    /// Time of an item beyond its blocks, instead of what --cost says
    #[arg(long, value_name = "US", value_parser = time)]
    pub per_item_us: Option<f64>,

    /// Orders and assignments [default: all that fit the pass]
    #[arg(
        long = "policy",
        value_name = "NAMES",
        value_delimiter = ',',
        value_enum
    )]
    pub policies: Vec<Schedule>,

    /// How items are acquired dynamically.
    #[command(flatten)]
    pub acquire: Acquire,

    /// Draw who does what when into FILE, the policies below one another
    #[arg(long, value_name = "FILE", conflicts_with = "ranks")]
    pub svg: Option<PathBuf>,

    /// Ranks that share rows.
    #[command(flatten)]
    pub batch: Batch,
}

/// A pass by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PassName {
    /// Items are query tiles
    Forward,
    /// Items are key tiles
    Backward,
}

impl PassName {
    fn pass(self) -> Pass {
        match self {
            Self::Forward => Pass::Forward,
            Self::Backward => Pass::Backward,
        }
    }
}

/// A cost by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CostName {
    /// A block is one unit of time, an item nothing beyond
    Unit,
    /// Microseconds measured on skeletons of FP8 kernels on an H200
    Hopper,
}

/// One policy on one row of documents and one GPU.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// A workload, a file or a distribution.
    pub documents: String,
    /// `forward` or `backward`.
    pub pass: &'static str,
    /// `causal`, `full` or `window:KEYS`.
    pub mask: String,
    /// Query heads.
    pub heads: usize,
    /// Of them that go together.
    pub heads_per_section: usize,
    /// Rows of an item.
    pub item_rows: usize,
    /// Items of all heads.
    pub positions: usize,
    /// SMs of the GPU.
    pub sms: usize,
    /// Time of a block.
    pub per_block: f64,
    /// Time of an item beyond its blocks.
    pub per_item: f64,
    /// Order and assignment.
    pub policy: String,
    /// When the last CTA is done.
    pub makespan: f64,
    /// What no schedule goes below.
    pub bound: f64,
    /// The makespan as a multiple of the bound.
    pub ratio: f64,
    /// Share of the SMs' time without work.
    pub idle_percent: f64,
    /// Time of the longest item.
    pub longest_item: f64,
    /// This package's version and commit.
    pub version: String,
}

/// What of a [`Row`] the table shows.
#[derive(Serialize)]
pub struct TableRow<'a> {
    documents: &'a str,
    sms: usize,
    policy: &'a str,
    makespan: f64,
    bound: f64,
    ratio: f64,
    idle_percent: f64,
    longest_item: f64,
}

impl Row {
    /// The part for the table.
    pub fn summary(&self) -> TableRow<'_> {
        TableRow {
            documents: &self.documents,
            sms: self.sms,
            policy: &self.policy,
            makespan: self.makespan,
            bound: self.bound,
            ratio: self.ratio,
            idle_percent: self.idle_percent,
            longest_item: self.longest_item,
        }
    }
}

/// A policy and what came of it.
pub struct Outcome {
    /// Order and assignment.
    pub policy: Schedule,
    /// Heads that go together.
    pub heads_per_section: usize,
    /// Who does what when.
    pub timeline: Timeline,
}

impl Simulate {
    /// A row for each row of documents, number of SMs and policy.
    ///
    /// # Errors
    /// Documents that cannot be had, a policy that does not fit the pass.
    pub fn rows(&self) -> Result<Vec<Row>, SchedError> {
        let policies = self.policies()?;
        let mut rows = Vec::new();
        for lengths in self.source.read()? {
            for &sms in &self.sms {
                for outcome in self.outcomes(&lengths, sms, &policies)? {
                    rows.push(self.row(&lengths, sms, &outcome));
                }
            }
        }
        Ok(rows)
    }

    /// The one row of documents and number of SMs that a drawing shows, under each policy.
    ///
    /// # Errors
    /// Several of them, and as for [`rows`](Self::rows).
    pub fn only(&self) -> Result<(String, Vec<Outcome>), SchedError> {
        let documents = self.source.read()?;
        let ([lengths], [sms]) = (documents.as_slice(), self.sms.as_slice()) else {
            return Err(SchedError::TooMuchToDraw {
                rows: documents.len(),
                sms: self.sms.len(),
            });
        };
        let outcomes = self.outcomes(lengths, *sms, &self.policies()?)?.collect();
        let title = format!(
            "{}, {} {}, {} heads, {sms} SMs",
            lengths.name,
            self.mask,
            self.pass_name(),
            self.heads(lengths)[0]
        );
        Ok((title, outcomes))
    }

    /// What stands above the table.
    pub fn caption(&self) -> String {
        let Cost {
            per_block,
            per_item,
        } = self.cost();
        format!(
            "schedules of the {} pass, {} mask, simulated: an item of {} rows takes {per_block} a block \
             and {per_item} more",
            self.pass_name(),
            self.mask,
            self.tiling().item_rows,
        )
    }

    /// The unit of time.
    pub fn unit(&self) -> &'static str {
        match (self.cost, self.per_block_us, self.per_item_us) {
            (CostName::Unit, None, None) => "blocks",
            _ => "µs",
        }
    }

    fn policies(&self) -> Result<Vec<Schedule>, SchedError> {
        let pass = self.pass.pass();
        if self.policies.is_empty() {
            let all = Schedule::value_variants().iter().copied();
            return Ok(all.filter(|policy| policy.fits(pass)).collect());
        }
        match self.policies.iter().find(|policy| !policy.fits(pass)) {
            None => Ok(self.policies.clone()),
            Some(other) => Err(SchedError::BackwardOnly {
                policy: other.name(),
            }),
        }
    }

    /// One at a time: a timeline of 131,072 one-token documents takes 100 MB.
    fn outcomes(
        &self,
        lengths: &Lengths,
        sms: NonZero<usize>,
        policies: &[Schedule],
    ) -> Result<impl Iterator<Item = Outcome>, SchedError> {
        let documents = Documents::from_lengths(&lengths.lengths)?;
        let (tiling, cost) = (self.tiling(), self.cost());
        let [heads, kv_heads] = self.heads(lengths);
        let total = documents.total();
        let per_section = self.per_section(heads, kv_heads, total);
        Ok(policies.iter().map(move |&name| {
            let policy = name.policy(heads, per_section, &self.acquire, total, sms.get());
            Outcome {
                policy: name,
                heads_per_section: policy.sections.per_section(),
                timeline: simulate(&documents, &tiling, &policy, &cost, sms),
            }
        }))
    }

    fn row(&self, lengths: &Lengths, sms: NonZero<usize>, outcome: &Outcome) -> Row {
        let timeline = &outcome.timeline;
        let cost = self.cost();
        Row {
            documents: lengths.name.clone(),
            pass: self.pass_name(),
            mask: self.mask.to_string(),
            heads: self.heads(lengths)[0].get(),
            heads_per_section: outcome.heads_per_section,
            item_rows: self.tiling().item_rows,
            positions: timeline.lanes().iter().map(Vec::len).sum(),
            sms: sms.get(),
            per_block: cost.per_block,
            per_item: cost.per_item,
            policy: outcome.policy.name(),
            makespan: timeline.makespan(),
            bound: timeline.bound(),
            ratio: timeline.ratio(),
            idle_percent: 100.0 * timeline.idle_share(),
            longest_item: timeline.longest(),
            version: version(),
        }
    }

    fn pass_name(&self) -> &'static str {
        match self.pass {
            PassName::Forward => "forward",
            PassName::Backward => "backward",
        }
    }

    fn tiling(&self) -> Tiling {
        let tiling = match self.pass {
            PassName::Forward => Tiling::forward(self.mask),
            PassName::Backward => Tiling::backward(self.mask),
        };
        match (self.item_rows, self.cost) {
            (Some(rows), _) => tiling.with_item_rows(rows.get()),
            (None, CostName::Hopper) => tiling.with_item_rows(TILE),
            (None, CostName::Unit) => tiling,
        }
    }

    fn cost(&self) -> Cost {
        let named = match (self.cost, self.pass) {
            (CostName::Unit, _) => Cost::UNIT,
            (CostName::Hopper, PassName::Forward) => Cost::HOPPER_FORWARD,
            (CostName::Hopper, PassName::Backward) => Cost::HOPPER_BACKWARD,
        };
        Cost {
            per_block: self.per_block_us.unwrap_or(named.per_block),
            per_item: self.per_item_us.unwrap_or(named.per_item),
        }
    }

    fn heads(&self, lengths: &Lengths) -> [NonZero<usize>; 2] {
        const DEFAULT: NonZero<usize> = NonZero::new(16).unwrap();
        let of_source = |index: usize| {
            let heads = lengths.heads.and_then(|heads| NonZero::new(heads[index]));
            heads.unwrap_or(DEFAULT)
        };
        let heads = self.heads.unwrap_or_else(|| of_source(0));
        let kv_heads = self.kv_heads.unwrap_or_else(|| of_source(1));
        [heads, kv_heads.min(heads)]
    }

    /// K and V of one byte each are read again and again forward; Q and dO, and FP16 sums of dQ,
    /// backward.
    fn per_section(
        &self,
        heads: NonZero<usize>,
        kv_heads: NonZero<usize>,
        total: usize,
    ) -> Option<NonZero<usize>> {
        const FEATURES: usize = 128;
        let Some(mib) = self.l2_mib else {
            return self.heads_per_section;
        };
        let group = NonZero::new(heads.get() / kv_heads).unwrap_or(NonZero::<usize>::MIN);
        let bytes = match self.pass {
            PassName::Forward => 2 * FEATURES / group,
            PassName::Backward => (2 + 2) * FEATURES,
        };
        let sections = HeadSections::fitting(heads, group, total, bytes, mib << 20);
        NonZero::new(sections.per_section())
    }
}
