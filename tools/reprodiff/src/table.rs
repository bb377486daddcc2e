//! What was compared.

use crate::Only;
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// Of each kind of comparison, such as `text --training` or `sim:neon grad`,
/// how many there were.
#[derive(Clone, Debug, Default)]
pub struct Table {
    rows: BTreeMap<String, Row>,
    left: Vec<(String, usize)>,
}

/// The comparisons of a kind.
#[derive(Clone, Debug, Default)]
pub struct Row {
    /// Layers that were the same.
    pub same: usize,
    /// Files or tensors of them.
    pub parts: usize,
    /// Layers that both builds refused.
    pub refused: usize,
    /// Layers that took a build too long.
    pub stopped: usize,
    /// Layers that were different.
    pub different: usize,
    /// Time that they took.
    pub time: Duration,
}

impl Table {
    /// The comparisons of a kind.
    pub fn row(&mut self, kind: &str) -> &mut Row {
        self.rows.entry(kind.to_string()).or_default()
    }

    /// Notes how many layers there was no time for.
    pub fn left(&mut self, what: &str, layers: usize) {
        self.left.push((what.to_string(), layers));
    }

    /// Returns whether text, or results, of some layers were the same.
    pub fn has(&self, only: Only) -> bool {
        let text = only == Only::Text;
        let mut rows = self.rows.iter();
        rows.any(|(kind, row)| kind.starts_with("text") == text && row.same > 0)
    }

    /// How many comparisons were stopped, and layers that there was no time for.
    pub fn unknown(&self) -> usize {
        let stopped = self.rows.values().map(|row| row.stopped);
        let left = self.left.iter().map(|(_, layers)| layers);
        stopped.sum::<usize>() + left.sum::<usize>()
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let heads = [
            "same",
            "parts",
            "refused",
            "stopped",
            "different",
            "seconds",
        ];
        write!(f, "{:26}", "")?;
        heads.iter().try_for_each(|head| write!(f, "{head:>10}"))?;
        writeln!(f)?;
        for (kind, row) in &self.rows {
            let counts = [row.same, row.parts, row.refused, row.stopped, row.different];
            write!(f, "{kind:26}")?;
            counts.iter().try_for_each(|n| write!(f, "{n:>10}"))?;
            writeln!(f, "{:>10.1}", row.time.as_secs_f64())?;
        }
        let left =
            |(what, layers): &(String, usize)| writeln!(f, "{what}: no time for {layers} layers");
        self.left.iter().try_for_each(left)
    }
}
