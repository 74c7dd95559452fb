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
        check.problems.extend(self.numerics_problem());
        if check.problems.is_empty() {
            Ok(())
        } else {
            Err(SettingsError::Invalid(check.problems))
        }
    }

    /// The settings of the keys that `wanted` picks: key, value and, unless a default, origin.
    pub(super) fn fields(
        &self,
        wanted: impl Fn(&str) -> bool,
    ) -> Vec<(&'static str, String, Option<String>)> {
        let values = self.values().into_iter();
        values
            .filter(|(key, _)| wanted(key.path))
            .map(|(key, value)| (key.path, value, self.origin(key.path).map(str::to_string)))
            .collect()
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
        self.problems.push(Problem {
            fields: self.settings.fields(|path| keys.contains(&path)),
            rule: rule.into(),
            fix: Some(fix.into()),
        });
    }

    fn ranges(&mut self) {
        let Settings {
            model,
            batch,
            optim,
            compute,
            eval,
            checkpoint,
            guard,
            log,
            distributed,
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
            ("guard.skip_limit", guard.skip_limit),
            ("log.every", log.every),
            ("distributed.bucket_mib", distributed.bucket_mib),
        ] {
            self.rule(
                value >= 1,
                &[key],
                "it must be at least 1",
                "give 1 or more",
            );
        }
        self.rule(
            batch.row_tokens >= 2,
            &["batch.row_tokens"],
            "a row must hold a token and the next one to predict",
            "give 2 or more",
        );
        self.rule(
            guard.spike_window >= 8,
            &["guard.spike_window"],
            "a median of fewer steps tells nothing",
            "give 8 or more",
        );
        for (key, value) in [
            ("guard.spike_factor", guard.spike_factor),
            ("model.rope_theta", model.rope_theta),
            ("model.norm_eps", model.norm_eps),
            ("model.init_std", model.init_std),
            ("optim.lr", optim.lr),
            ("optim.eps", optim.eps),
            ("optim.clip", optim.clip),
            ("distributed.lost_after", distributed.lost_after),
            ("distributed.patience", distributed.patience),
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
            ("compute.peak_tflops", compute.peak_tflops),
        ] {
            self.rule(
                value.is_finite() && value >= 0.0,
                &[key],
                "it must not be below 0",
                "give 0 or more",
            );
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
        let Settings { model, optim, .. } = self.settings;
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
    }
}
