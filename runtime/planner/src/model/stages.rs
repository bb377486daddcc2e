//! The layers of pipeline stages.

use std::ops::Range;

/// The layers of one stage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct StageLayers {
    pub dense: usize,
    pub moe: usize,
    /// Whether the stage has the embedding.
    pub first: bool,
    /// Whether the stage has the output head.
    pub last: bool,
}

/// The seconds of a micro-batch in one layer of each kind, and in the head.
#[derive(Clone, Copy, Debug)]
pub(super) struct LayerSeconds {
    pub dense: f64,
    pub moe: f64,
    pub head: f64,
}

/// Splits the layers of a model over stages, so that the slowest stage takes as little as
/// possible. Layers without experts come first, as in published models. Earlier stages get fewer
/// layers where numbers do not divide, because more micro-batches are in flight there.
pub(super) fn split(
    dense: usize,
    moe: usize,
    stages: usize,
    seconds: LayerSeconds,
) -> Vec<StageLayers> {
    let time = |layer: usize| {
        if layer < dense {
            seconds.dense
        } else {
            seconds.moe
        }
    };
    let layers = dense + moe;
    let all = (0..layers).map(time).sum::<f64>() + seconds.head;
    let (mut low, mut high) = (all / stages as f64, all);
    // The least limit that can be filled is found by halving; forty times are beyond f64's need.
    for _ in 0..40 {
        let middle = (low + high) / 2.0;
        match fill(layers, stages, (middle, seconds.head), time) {
            Some(_) => high = middle,
            None => low = middle,
        }
    }
    let ranges = fill(layers, stages, (high, seconds.head), time).unwrap_or_default();
    let count = ranges.len();
    let stage = |(at, range): (usize, Range<usize>)| {
        let before = range.end.min(dense).saturating_sub(range.start);
        StageLayers {
            dense: before,
            moe: range.len() - before,
            first: at == 0,
            last: at + 1 == count,
        }
    };
    ranges.into_iter().enumerate().map(stage).collect()
}

/// Returns the layers of each stage, filled from the last, if every stage then takes at most the
/// limit and has a layer.
fn fill(
    layers: usize,
    stages: usize,
    (limit, head): (f64, f64),
    time: impl Fn(usize) -> f64,
) -> Option<Vec<Range<usize>>> {
    let mut end = layers;
    let mut ranges = Vec::with_capacity(stages);
    for stage in (0..stages).rev() {
        let mut left = limit;
        if stage + 1 == stages {
            left -= head;
        }
        let mut start = end;
        // Each stage before this one needs a layer.
        while start > stage && time(start - 1) <= left * (1.0 + 1e-9) {
            left -= time(start - 1);
            start -= 1;
        }
        if start == end {
            return None;
        }
        ranges.push(start..end);
        end = start;
    }
    ranges.reverse();
    (end == 0).then_some(ranges)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_layer_has_a_stage_and_the_head_counts() {
        let seconds = LayerSeconds {
            dense: 1.0,
            moe: 2.0,
            head: 2.0,
        };
        let stages = split(3, 58, 4, seconds);
        assert_eq!(stages.iter().map(|stage| stage.moe).sum::<usize>(), 58);
        assert_eq!(stages.iter().map(|stage| stage.dense).sum::<usize>(), 3);
        assert!(stages[3].moe < stages[2].moe, "{stages:?}");
        assert!(stages[0].first && stages[3].last);
        // More stages than layers cannot be.
        assert!(split(0, 2, 4, seconds).is_empty());
    }
}
