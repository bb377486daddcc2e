//! What `tune` says.

use super::measure::Pairs;
use super::search::{Candidate, Found, Tried};
use crate::console::Palette;
use crate::table::{Cell, Table};
use crate::units;
use moesaic::{Engine, LayerSpec};
use serde_json::{Value, json};
use std::path::Path;

/// A finished search.
pub struct Report<'a> {
    pub engine: &'a Engine,
    pub spec: &'a LayerSpec,
    pub tokens: &'a [usize],
    pub found: &'a Found,
    pub file: &'a Path,
}

impl Report<'_> {
    /// For people.
    pub fn text(&self, palette: &Palette) -> String {
        let title = format!("{} on {}", self.spec.name, self.engine.target());
        let machine = self.engine.machine();
        format!(
            "{}\n  {}, {}\n\n{}\n{}\nkept in {}\n{}\n",
            palette.bold(&title),
            machine.name,
            units::count(machine.threads as usize, "thread"),
            self.table().render(palette),
            self.chosen(),
            self.file.display(),
            self.verdict(),
        )
    }

    /// A line per value that was tried: times of the launches that it changes and
    /// ratios of pairs, then what that makes of the whole layer.
    fn table(&self) -> Table {
        let at = self.tokens.iter();
        let at = at.map(|&tokens| format!(">{}", units::count(tokens, "token").to_uppercase()));
        let titles: Vec<String> = ["KERNELS", "SIZE", ">VALUE"]
            .map(str::to_string)
            .into_iter()
            .chain(at)
            .chain([">LAYER".to_string(), String::new()])
            .collect();
        let titles: Vec<&str> = titles.iter().map(String::as_str).collect();
        let mut table = Table::new(&titles);
        for tried in &self.found.tried {
            table.row(before(tried));
            for (i, candidate) in tried.candidates.iter().enumerate() {
                table.row(cells(candidate, tried.winner == Some(i)));
            }
        }
        table
    }

    fn chosen(&self) -> String {
        let sizes = self.found.tuning.sizes();
        let sizes: Vec<String> = sizes
            .map(|(knob, size)| format!("{} {size}", knob.name()))
            .collect();
        match sizes.is_empty() {
            _ if self.found.dropped => {
                "the best sizes together are not faster than the default, which stays".to_string()
            }
            true => "no size is clearly better than the default".to_string(),
            false => format!("better than the default: {}", sizes.join(", ")),
        }
    }

    /// Percent by which the default is slower than what was found, where it is
    /// most so.
    fn behind(&self) -> f64 {
        let most = self.found.gain.iter().copied().fold(1.0, f64::max);
        (most - 1.0) * 100.0
    }

    fn verdict(&self) -> String {
        let pairs = self.tokens.iter().zip(&self.found.gain);
        let each: Vec<String> = pairs
            .map(|(&tokens, gain)| {
                let percent = (gain - 1.0) * 100.0;
                format!("{percent:.1} % at {}", units::count(tokens, "token"))
            })
            .collect();
        format!(
            "default heuristics within {:.1} % of tuned ({})",
            self.behind(),
            each.join(", ")
        )
    }

    /// For scripts.
    pub fn json(&self) -> Value {
        let machine = self.engine.machine();
        let sizes = self.found.tuning.sizes();
        let sizes: serde_json::Map<String, Value> = sizes
            .map(|(knob, size)| (knob.name().to_string(), json!(size)))
            .collect();
        json!({
            "layer": self.spec.name,
            "target": self.engine.target().to_string(),
            "device": machine.name,
            "threads": machine.threads,
            "tokens": self.tokens,
            "tried": self.found.tried.iter().map(|tried| self.tried_json(tried)).collect::<Vec<_>>(),
            "tuning": sizes,
            "gain": self.found.gain,
            "default_within_percent": self.behind(),
            "file": self.file.display().to_string(),
        })
    }

    fn tried_json(&self, tried: &Tried) -> Value {
        let at = |(pairs, tokens): (&Pairs, &usize)| {
            json!({
                "tokens": tokens,
                "seconds": pairs.seconds,
                "ratio": pairs.ratio,
                "faster": pairs.agreed,
                "share": pairs.share,
                "pairs": pairs.pairs,
            })
        };
        let candidate = |candidate: &Candidate| {
            let at = candidate.at.iter().zip(self.tokens).map(at);
            json!({
                "value": candidate.size,
                "layer_ratio": candidate.ratio(),
                "at": at.collect::<Vec<_>>(),
            })
        };
        json!({
            "stem": tried.choice.knob.stem().name(),
            "size": tried.choice.knob.name(),
            "default": tried.choice.default,
            "seconds": tried.before,
            "candidates": tried.candidates.iter().map(candidate).collect::<Vec<_>>(),
            "winner": tried.winner.map(|winner| tried.candidates[winner].size),
        })
    }
}

fn before(tried: &Tried) -> Vec<Cell> {
    let knob = tried.choice.knob;
    let mut cells: Vec<Cell> = vec![
        knob.stem().name().into(),
        knob.name().into(),
        tried.choice.default.to_string().into(),
    ];
    cells.extend(tried.before.iter().map(|s| units::seconds(*s).into()));
    let mark = match tried.winner {
        None => Cell::styled("best", "32"),
        Some(_) => "".into(),
    };
    cells.extend([Cell::from("1.000"), mark]);
    cells
}

fn cells(candidate: &Candidate, won: bool) -> Vec<Cell> {
    let mut cells: Vec<Cell> = vec!["".into(), "".into(), candidate.size.to_string().into()];
    let at = |pairs: &Pairs| format!("{} {:.2}x", units::seconds(pairs.seconds), pairs.ratio);
    cells.extend(candidate.at.iter().map(|pairs| at(pairs).into()));
    let mark = match won {
        true => Cell::styled("best", "32"),
        false => "".into(),
    };
    cells.extend([format!("{:.3}", candidate.ratio()).into(), mark]);
    cells
}
