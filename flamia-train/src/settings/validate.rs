//! The second stage: rules about the merged settings.

use super::error::{Problem, SettingsError};
use super::table::Settings;

impl Settings {
    /// Checks ranges, and values that must go together.
    ///
    /// # Errors
    /// [`SettingsError::Invalid`] with every rule that is broken.
    pub fn validate(&self) -> Result<(), SettingsError> {
        let mut check = Check {
            settings: self,
            problems: Vec::new(),
        };
        check.ranges();
        check.combinations();
        if check.problems.is_empty() {
            Ok(())
        } else {
            Err(SettingsError::Invalid(check.problems))
        }
    }
}

struct Check<'a> {
    settings: &'a Settings,
    problems: Vec<Problem>,
}

impl Check<'_> {
    fn rule(
        &mut self,
        holds: bool,
        keys: &[&str],
        rule: impl Into<String>,
        fix: impl Into<String>,
    ) {
        if holds {
            return;
        }
        let values = self.settings.values().into_iter();
        let fields = values.filter(|(key, _)| keys.contains(&key.path));
        let fields = fields.map(|(key, value)| {
            (
                key.path,
                value,
                self.settings.origin(key.path).map(str::to_string),
            )
        });
        self.problems.push(Problem {
            fields: fields.collect(),
            rule: rule.into(),
            fix: fix.into(),
        });
    }

    fn ranges(&mut self) {
        let Settings {
            model,
            batch,
            optim,
            kernel,
            eval,
            checkpoint,
            log,
            ..
        } = self.settings;
        for (key, value) in [
            ("steps", self.settings.steps),
            ("model.dim", model.dim),
            ("model.layers", model.layers),
            ("model.heads", model.heads),
            ("model.kv_heads", model.kv_heads),
            ("model.ffn_dim", model.ffn_dim),
            ("batch.rows", batch.rows),
            ("batch.accumulate", batch.accumulate),
            ("eval.every", eval.every),
            ("eval.rows", eval.rows),
            ("checkpoint.every", checkpoint.every),
            ("checkpoint.keep", checkpoint.keep),
            ("log.every", log.every),
        ] {
            self.rule(
                value >= 1,
                &[key],
                "it must be at least 1",
                "give 1 or more",
            );
        }
        self.rule(
            matches!(model.head_dim, 64 | 128),
            &["model.head_dim"],
            "the attention is built for head dimensions 64 and 128",
            "give one of them",
        );
        self.rule(
            batch.row_tokens >= 2,
            &["batch.row_tokens"],
            "a row must hold a token and the next one to predict",
            "give 2 or more",
        );
        for (key, value) in [
            ("model.rope_theta", model.rope_theta),
            ("model.norm_eps", model.norm_eps),
            ("model.init_std", model.init_std),
            ("optim.lr", optim.lr),
            ("optim.eps", optim.eps),
            ("optim.clip", optim.clip),
        ] {
            let holds = value.is_finite() && value > 0.0;
            self.rule(
                holds,
                &[key],
                "it must be above 0",
                "give a positive number",
            );
        }
        for (key, value) in [
            ("optim.weight_decay", optim.weight_decay),
            ("kernel.tau", kernel.tau),
        ] {
            let holds = value.is_finite() && value >= 0.0;
            self.rule(holds, &[key], "it must not be below 0", "give 0 or more");
        }
        for (key, value) in [("optim.beta1", optim.beta1), ("optim.beta2", optim.beta2)] {
            let holds = (0.0..1.0).contains(&value);
            self.rule(
                holds,
                &[key],
                "a decay is from 0 to below 1",
                "give one such as 0.9",
            );
        }
        self.rule(
            (0.0..=1.0).contains(&optim.min_lr_ratio),
            &["optim.min_lr_ratio"],
            "it is a share of the peak learning rate",
            "give a number from 0 to 1",
        );
        self.rule(
            eval.fraction > 0.0 && eval.fraction < 1.0,
            &["eval.fraction"],
            "both training and validation need documents",
            "give a number between 0 and 1, such as 0.05",
        );
    }

    /// What must go together; a value that is out of range is not told twice.
    fn combinations(&mut self) {
        let Settings {
            model,
            optim,
            kernel,
            ..
        } = self.settings;
        let steps = self.settings.steps;
        let divisors = (1..=model.heads.min(1024)).filter(|n| model.heads.is_multiple_of(*n));
        let divisors: Vec<_> = divisors.map(|n| n.to_string()).collect();
        self.rule(
            model.kv_heads == 0 || model.heads.is_multiple_of(model.kv_heads),
            &["model.heads", "model.kv_heads"],
            "the query heads must be a multiple of the key and value heads that they share",
            format!("give --model-kv-heads one of {}", divisors.join(", ")),
        );
        self.rule(
            steps == 0 || optim.warmup <= steps,
            &["steps", "optim.warmup"],
            "the warm-up would be longer than the run",
            format!("give --optim-warmup {}, or more --steps", steps / 10),
        );
        let bound = 448_f64.log2();
        let sum = kernel.c as f64 + kernel.tau;
        self.rule(
            sum <= bound,
            &["kernel.c", "kernel.tau"],
            format!(
                "c + tau = {sum} passes log2(448) = {bound:.4}, so that attention weights of up to \
                 2^(c + tau) would be clamped to E4M3's largest number without a sign",
            ),
            "lower one of them; 4 and 4 are the defaults",
        );
    }
}
