//! The output of `tune`.

use super::measure::Pairs;
use super::search::{Candidate, Found, Tried};
use crate::palette::Palette;
use crate::table::{Cell, Table};
use crate::units;
use moesaic::{Engine, LayerSpec};
use serde_json::{Value, json};
use std::path::Path;

/// The result of a search.
pub struct TuneReport<'a> {
    pub engine: &'a Engine,
    pub spec: &'a LayerSpec,
    /// The findings for each number of tokens.
    pub found: &'a [Found],
    pub file: &'a Path,
}

impl TuneReport<'_> {
    /// Renders the report for people.
    pub fn text(&self, palette: &Palette) -> String {
        let title = format!("{} on {}", self.spec.name, self.engine.target());
        let machine = self.engine.machine();
        let found = self.found.iter().map(|found| section(found, palette));
        format!(
            "{}\n  {}, {}\n{}\nkept in {}\n{}\n",
            palette.bold(&title),
            machine.name,
            units::count(machine.threads as usize, "thread"),
            found.collect::<String>(),
            self.file.display(),
            self.verdict(),
        )
    }

    /// Returns the largest slowdown of the default sizes against the best ones found, in percent.
    fn behind(&self) -> f64 {
        let gains = self.found.iter().map(|found| found.best.gain);
        let most = gains.fold(1.0, f64::max);
        (most - 1.0) * 100.0
    }

    fn verdict(&self) -> String {
        let one = |found: &Found| {
            let percent = (found.best.gain - 1.0) * 100.0;
            format!("{percent:.1} % at {}", tokens(found))
        };
        let each: Vec<String> = self.found.iter().map(one).collect();
        format!(
            "default heuristics within {:.1} % of tuned ({})",
            self.behind(),
            each.join(", ")
        )
    }

    /// Returns the report as JSON, for scripts.
    pub fn json(&self) -> Value {
        let machine = self.engine.machine();
        json!({
            "layer": self.spec.name,
            "target": self.engine.target().to_string(),
            "device": machine.name,
            "threads": machine.threads,
            "buckets": self.found.iter().map(bucket_json).collect::<Vec<_>>(),
            "default_within_percent": self.behind(),
            "file": self.file.display().to_string(),
        })
    }
}

fn tokens(found: &Found) -> String {
    units::count(found.best.tokens, "token")
}

/// Renders the candidates for one number of tokens, and the best sizes.
fn section(found: &Found, palette: &Palette) -> String {
    format!(
        "\n{}\n{}{}\n",
        palette.bold(&tokens(found)),
        table(found).render(palette),
        chosen(found)
    )
}

/// Returns a table with one line per candidate value: times and ratios of the launches that the
/// value changes, then the effect on the whole layer.
fn table(found: &Found) -> Table {
    let mut table = Table::new(&["KERNELS", "SIZE", ">VALUE", ">TIME", ">LAYER", ""]);
    for tried in &found.tried {
        table.row(before(tried));
        for (i, candidate) in tried.candidates.iter().enumerate() {
            table.row(cells(candidate, tried.winner == Some(i)));
        }
    }
    table
}

fn chosen(found: &Found) -> String {
    let sizes = found.best.tuning.sizes();
    let sizes: Vec<String> = sizes
        .map(|(knob, size)| format!("{} {size}", knob.name()))
        .collect();
    if found.dropped {
        "the best sizes together are not faster than the default, which stays".to_string()
    } else if sizes.is_empty() {
        "no size is clearly better than the default".to_string()
    } else {
        format!("better than the default: {}", sizes.join(", "))
    }
}

fn bucket_json(found: &Found) -> Value {
    let sizes = found.best.tuning.sizes();
    let sizes: serde_json::Map<String, Value> = sizes
        .map(|(knob, size)| (knob.name().to_string(), json!(size)))
        .collect();
    json!({
        "tokens": found.best.tokens,
        "tried": found.tried.iter().map(tried_json).collect::<Vec<_>>(),
        "tuning": sizes,
        "gain": found.best.gain,
    })
}

fn tried_json(tried: &Tried) -> Value {
    let candidate = |Candidate { size, pairs }: &Candidate| {
        json!({
            "value": size,
            "seconds": pairs.seconds,
            "ratio": pairs.ratio,
            "faster": pairs.agreed,
            "share": pairs.share,
            "pairs": pairs.pairs,
            "layer_ratio": pairs.whole(),
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

fn before(tried: &Tried) -> Vec<Cell> {
    let knob = tried.choice.knob;
    let mut cells: Vec<Cell> = vec![
        knob.stem().name().into(),
        knob.name().into(),
        tried.choice.default.to_string().into(),
    ];
    let mark = match tried.winner {
        None => Cell::styled("best", "32"),
        Some(_) => "".into(),
    };
    cells.extend([units::seconds(tried.before).into(), "1.000".into(), mark]);
    cells
}

fn cells(candidate: &Candidate, won: bool) -> Vec<Cell> {
    let mut cells: Vec<Cell> = vec!["".into(), "".into(), candidate.size.to_string().into()];
    let Pairs { seconds, ratio, .. } = candidate.pairs;
    let time = format!("{} {ratio:.2}x", units::seconds(seconds));
    let mark = if won {
        Cell::styled("best", "32")
    } else {
        "".into()
    };
    let layer = format!("{:.3}", candidate.ratio());
    cells.extend([time.into(), layer.into(), mark]);
    cells
}
