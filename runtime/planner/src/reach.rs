//! The number of nodes that a token's experts lie on, if every order of expert scores is equally
//! likely.
//!
//! A router with `groups` keeps the `keep` groups whose best experts score highest, and sends the
//! token to the `top_k` best experts of these. Go down the experts by score: each expert is
//! chosen unless it would open one group too many. So the choices are draws without replacement,
//! from all experts until `keep` groups have one, and from these groups afterwards. This is exact
//! for the statistic `max`; under `top2-sum` a few tokens in a hundred reach a node less. Until
//! the last draw, only the set of open groups and the number of draws on the node matter: a
//! Markov chain with few states, which is evaluated exactly. A layer without groups has one group
//! that is always kept, which gives the hypergeometric distribution.
//!
//! A router with `select = { per-group = n }` takes `top_k / n` experts of each group: the groups'
//! hypergeometric distributions, added up.

use moesaic_spec::{LayerSpec, Select};

/// The rule by which a token's experts follow from groups of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GroupRule {
    /// The best experts of at most this many groups.
    Keep(usize),
    /// This many experts of every group.
    OfEach(usize),
}

/// Returns the rule of a layer's router, and the experts of a group; `None` without groups.
pub(crate) fn group_rule(spec: &LayerSpec) -> Option<(GroupRule, usize)> {
    match (&spec.router.groups, spec.router.select) {
        (Some(groups), _) => Some((GroupRule::Keep(groups.keep), groups.size(spec))),
        (None, Select::PerGroup(count)) => {
            let count = count.max(1);
            let size = (spec.routed_experts() / count).max(1);
            Some((GroupRule::OfEach(spec.shape.top_k / count), size))
        }
        (None, _) => None,
    }
}

/// Groups of experts that are equal from the view of one node.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct GroupKind {
    /// The number of these groups.
    pub groups: usize,
    /// The experts of such a group on the node. Experts of unequal popularity count as their
    /// share of all rows, times the number of all experts.
    pub here: f64,
    /// The group's other experts, counted in the same way.
    pub elsewhere: f64,
}

/// The groups of experts from the view of one node, and how many of them a token uses.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Reach {
    rule: GroupRule,
    kinds: Vec<GroupKind>,
}

/// The most kinds of groups that are distinguished, because the number of states is the product
/// of their counts.
const MOST_KINDS: usize = 5;

/// The difference of experts below which kinds are equal, to absorb rounding.
const SAME: f64 = 1e-6;

impl Reach {
    /// Merges groups, each given as a [`GroupKind`] of one. Groups without an expert on the node
    /// count as their mean, and so do adjacent kinds where there are too many.
    pub fn new(rule: GroupRule, groups: impl IntoIterator<Item = GroupKind>) -> Reach {
        let (mut kinds, away): (Vec<GroupKind>, Vec<GroupKind>) =
            groups.into_iter().partition(|kind| kind.here > 0.0);
        kinds.sort_by(|a, b| (a.here.total_cmp(&b.here)).then(a.elsewhere.total_cmp(&b.elsewhere)));
        let mut kinds = kinds.into_iter().fold(Vec::new(), with_its_like);
        while kinds.len() >= MOST_KINDS {
            kinds = kinds.chunks(2).filter_map(mean).collect();
        }
        kinds.extend(mean(&away));
        Reach { rule, kinds }
    }

    /// Returns the view of experts without groups, some of which are on the node.
    pub fn ungrouped(here: f64, elsewhere: f64) -> Reach {
        let all = GroupKind {
            groups: 1,
            here,
            elsewhere,
        };
        Reach::new(GroupRule::Keep(1), [all])
    }

    /// Returns whether two views are equal but for rounding.
    fn is_like(&self, other: &Reach) -> bool {
        let near = |a: f64, b: f64| (a - b).abs() < SAME;
        let like = |(a, b): (&GroupKind, &GroupKind)| {
            a.groups == b.groups && near(a.here, b.here) && near(a.elsewhere, b.elsewhere)
        };
        let mut kinds = self.kinds.iter().zip(&other.kinds);
        self.kinds.len() == other.kinds.len() && kinds.all(like)
    }

    /// Returns the probability that a token with `top_k` experts has at least one on the node.
    pub fn touched(&self, top_k: usize) -> f64 {
        (1.0 - self.hits(top_k, 0)[0]).clamp(0.0, 1.0)
    }

    /// Returns the probabilities that 0, 1, … `most` of a token's `top_k` experts are on the
    /// node.
    pub fn hits(&self, top_k: usize, most: usize) -> Vec<f64> {
        match self.rule {
            GroupRule::Keep(keep) => self.hits_of_kept(keep, top_k, most),
            GroupRule::OfEach(experts) => self.hits_of_each(experts, most),
        }
    }

    fn hits_of_each(&self, experts: usize, most: usize) -> Vec<f64> {
        let mut chances = vec![0.0; most + 1];
        chances[0] = 1.0;
        for kind in &self.kinds {
            let one = Reach::ungrouped(kind.here, kind.elsewhere).hits(experts, most);
            for _ in 0..kind.groups {
                let sum = |hits: usize| (0..=hits).map(|of| chances[of] * one[hits - of]).sum();
                chances = (0..=most).map(sum).collect();
            }
        }
        chances
    }

    fn hits_of_kept(&self, keep: usize, top_k: usize, most: usize) -> Vec<f64> {
        let states: usize = self.kinds.iter().map(|kind| kind.groups + 1).product();
        let width = most + 1;
        let mut chances = vec![0.0; states * width];
        chances[0] = 1.0;
        // Draw the experts of a token one after the other; the state after each draw is all that
        // the next one depends on.
        for drawn in 0..top_k {
            let mut next = vec![0.0; chances.len()];
            for (at, chance) in chances.iter().enumerate().filter(|(_, c)| **c > 0.0) {
                self.draw(
                    keep,
                    drawn,
                    (at / width, at % width),
                    |state, hits, part| {
                        // More hits than asked for need no state of their own.
                        if hits <= most {
                            next[state * width + hits] += chance * part;
                        }
                    },
                );
            }
            chances = next;
        }
        let of = |hits: usize| chances.iter().skip(hits).step_by(width).sum();
        (0..=most).map(of).collect()
    }

    /// Calls `to` with each state after one more draw, its hits, and its probability. A state
    /// holds the number of open groups of each kind, as digits.
    fn draw(
        &self,
        keep: usize,
        drawn: usize,
        (state, hits): (usize, usize),
        mut to: impl FnMut(usize, usize, f64),
    ) {
        let (mut digits, mut step) = (state, 1);
        let (mut begun, mut here, mut elsewhere) = (0, 0.0, 0.0);
        let mut fresh = Vec::with_capacity(self.kinds.len());
        for kind in &self.kinds {
            let number = digits % (kind.groups + 1);
            digits /= kind.groups + 1;
            begun += number;
            here += number as f64 * kind.here;
            elsewhere += number as f64 * kind.elsewhere;
            let others = (kind.groups - number) as f64;
            fresh.push((state + step, others * kind.here, others * kind.elsewhere));
            step *= kind.groups + 1;
        }
        // All allowed groups are open, so no draw may open another.
        if begun >= keep {
            fresh.clear();
        }
        // Earlier draws came from the open groups and are not available again.
        fresh.push((
            state,
            (here - hits as f64).max(0.0),
            (elsewhere - (drawn - hits) as f64).max(0.0),
        ));
        let all: f64 = fresh
            .iter()
            .map(|(_, here, elsewhere)| here + elsewhere)
            .sum();
        if all <= 0.0 {
            // No expert is left.
            return to(state, hits, 1.0);
        }
        for (state, here, elsewhere) in fresh {
            if here > 0.0 {
                to(state, hits + 1, here / all);
            }
            if elsewhere > 0.0 {
                to(state, hits, elsewhere / all);
            }
        }
    }
}

/// Nodes with the same view of the groups.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Alike {
    /// Their view.
    pub reach: Reach,
    /// The number of these nodes.
    pub nodes: f64,
}

/// Returns the views of `nodes` nodes on a layer's equally popular experts, which lie in order
/// and in equal parts on them.
pub(crate) fn of_nodes(spec: &LayerSpec, nodes: f64) -> Vec<Alike> {
    let experts = spec.shape.experts as f64;
    let (rule, size) = match group_rule(spec) {
        Some((rule, size)) => (rule, size as f64),
        None => (GroupRule::Keep(1), experts),
    };
    let each = experts / nodes;
    let mut list: Vec<Alike> = Vec::new();
    for node in 0..nodes.ceil() as usize {
        let own = node as f64 * each..((node + 1) as f64 * each).min(experts);
        let groups = (0..(experts / size).ceil() as usize).map(|group| {
            let all = group as f64 * size..((group + 1) as f64 * size).min(experts);
            let here = own.end.min(all.end) - own.start.max(all.start);
            // Bounds that differ by rounding alone must not give a node a sliver of a group.
            let here = if here > SAME { here } else { 0.0 };
            let elsewhere = (all.end - all.start - here).max(0.0);
            GroupKind {
                groups: 1,
                here,
                elsewhere,
            }
        });
        let reach = Reach::new(rule, groups);
        let part = (own.end - own.start) / each;
        match list.iter_mut().find(|of| of.reach.is_like(&reach)) {
            Some(alike) => alike.nodes += part,
            None => list.push(Alike { reach, nodes: part }),
        }
    }
    list
}

fn with_its_like(mut kinds: Vec<GroupKind>, next: GroupKind) -> Vec<GroupKind> {
    match kinds.last_mut() {
        Some(last)
            if (last.here - next.here).abs() < SAME
                && (last.elsewhere - next.elsewhere).abs() < SAME =>
        {
            last.groups += next.groups;
        }
        _ => kinds.push(next),
    }
    kinds
}

/// Returns the mean of all groups; `None` for none.
fn mean(kinds: &[GroupKind]) -> Option<GroupKind> {
    let groups: usize = kinds.iter().map(|kind| kind.groups).sum();
    let sum = |of: fn(&GroupKind) -> f64| {
        let each = kinds.iter().map(|kind| kind.groups as f64 * of(kind));
        each.sum::<f64>() / groups as f64
    };
    (groups > 0).then(|| GroupKind {
        groups,
        here: sum(|kind| kind.here),
        elsewhere: sum(|kind| kind.elsewhere),
    })
}

/// Returns the mean number of `groups` equal sets of experts, such as nodes, that a token with
/// `top_k` of `experts` experts reaches. Every choice is equally likely, without group limits.
pub fn expected_groups(experts: f64, top_k: usize, groups: f64) -> f64 {
    let here = experts / groups;
    groups * Reach::ungrouped(here, experts - here).touched(top_k)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RoutedRows;

    /// Random numbers in [0, 1).
    struct Draw(u64);

    impl Draw {
        fn next(&mut self) -> f64 {
            self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            (self.0 >> 33) as f64 / (1u64 << 31) as f64
        }
    }

    /// Layers of `count` groups of `size` experts.
    #[derive(Clone, Copy, Debug)]
    struct Grouped {
        count: usize,
        size: usize,
        /// The groups that a token keeps; 0 where it takes as many experts from each.
        keep: usize,
        top_k: usize,
    }

    impl Grouped {
        /// Returns the experts of a token with random scores, by the rule of SEMANTICS.md.
        fn chosen(&self, draw: &mut Draw, best: usize) -> Vec<usize> {
            let scores = (0..self.count * self.size).map(|_| draw.next());
            self.best(&scores.collect::<Vec<f64>>(), best)
        }

        /// Returns the experts of a token with these scores.
        fn best(&self, scores: &[f64], best: usize) -> Vec<usize> {
            if self.keep == 0 {
                return self.of_each(scores);
            }
            let stat = |group: usize| {
                let mut own = scores[group * self.size..(group + 1) * self.size].to_vec();
                own.sort_by(|a, b| b.total_cmp(a));
                own[..best].iter().sum::<f64>()
            };
            let stats: Vec<f64> = (0..self.count).map(stat).collect();
            let mut groups: Vec<usize> = (0..self.count).collect();
            groups.sort_by(|a, b| stats[*b].total_cmp(&stats[*a]));
            let kept = &groups[..self.keep];
            let mut experts: Vec<usize> = (0..scores.len())
                .filter(|expert| kept.contains(&(expert / self.size)))
                .collect();
            experts.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
            experts.truncate(self.top_k);
            experts
        }

        /// Returns the best experts of every group.
        fn of_each(&self, scores: &[f64]) -> Vec<usize> {
            let best = |group: usize| {
                let mut own: Vec<usize> = (group * self.size..(group + 1) * self.size).collect();
                own.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
                own.truncate(self.top_k / self.count);
                own
            };
            (0..self.count).flat_map(best).collect()
        }

        fn spec(&self) -> LayerSpec {
            let (
                experts,
                Grouped {
                    count, keep, top_k, ..
                },
            ) = (self.count * self.size, self);
            let router = match keep {
                0 => format!("select = {{ per-group = {count} }}"),
                _ => format!("groups = {{ count = {count}, keep = {keep}, stat = \"max\" }}"),
            };
            let text = format!(
                "shape = {{ model_dim = 64, hidden_dim = 64, experts = {experts}, top_k = {top_k} }}
                 router = {{ {router} }}"
            );
            LayerSpec::from_toml(&text).unwrap()
        }
    }

    const TOKENS: usize = 2000;

    /// Groups that are nodes, that span nodes, several of which share a node, and that begin in
    /// the middle of a node.
    #[test]
    fn tokens_reach_as_many_nodes_as_drawn_ones_do() {
        let mut draw = Draw(7);
        let layers = [
            (8, 32, 4, 8),
            (8, 32, 2, 8),
            (8, 8, 3, 6),
            (4, 6, 1, 4),
            (4, 6, 2, 2),
            (6, 4, 3, 5),
            (4, 6, 4, 3),
            (1, 24, 1, 4),
            (8, 32, 0, 8),
            (4, 6, 0, 8),
            (2, 12, 0, 4),
        ];
        for (count, size, keep, top_k) in layers {
            let layer = Grouped {
                count,
                size,
                keep,
                top_k,
            };
            let tokens: Vec<Vec<usize>> = (0..TOKENS).map(|_| layer.chosen(&mut draw, 1)).collect();
            for nodes in [1, 2, 3, 4, 8] {
                let each = count * size / nodes;
                if each * nodes != count * size {
                    continue;
                }
                let of = |token: &Vec<usize>| -> Vec<usize> {
                    let mut hits = vec![0; nodes];
                    token.iter().for_each(|expert| hits[expert / each] += 1);
                    hits
                };
                let hits: Vec<usize> = tokens.iter().flat_map(of).collect();
                let found = of_nodes(&layer.spec(), nodes as f64);
                let all: f64 = found.iter().map(|alike| alike.nodes).sum();
                assert!((all - nodes as f64).abs() < 1e-9);
                for number in 0..=top_k {
                    let drawn = hits.iter().filter(|n| **n == number).count() as f64;
                    let chance = found
                        .iter()
                        .map(|alike| alike.nodes / all * alike.reach.hits(top_k, top_k)[number]);
                    let (chance, drawn) = (chance.sum::<f64>(), drawn / hits.len() as f64);
                    // Four standard deviations of this many draws.
                    let most = 4.0 * (chance * (1.0 - chance) / TOKENS as f64).sqrt() + 1e-9;
                    assert!(
                        (chance - drawn).abs() <= most,
                        "{layer:?}, {number} on one of {nodes} nodes: {chance}, drawn {drawn}"
                    );
                }
                for alike in &found {
                    let hits = alike.reach.hits(top_k, top_k);
                    assert!((hits.iter().sum::<f64>() - 1.0).abs() < 1e-9);
                    let touched = alike.reach.touched(top_k);
                    assert!((touched - (1.0 - hits[0])).abs() < 1e-12);
                }
            }
        }
    }

    /// The sum of the two best scores chooses a group a little more often whose best expert is
    /// not among the token's.
    #[test]
    fn another_statistic_reaches_hardly_fewer_nodes() {
        let mut draw = Draw(11);
        let layer = Grouped {
            count: 8,
            size: 32,
            keep: 4,
            top_k: 8,
        };
        let nodes = |token: Vec<usize>| {
            let mut groups: Vec<usize> = token.iter().map(|expert| expert / 32).collect();
            groups.sort_unstable();
            groups.dedup();
            groups.len()
        };
        let drawn: usize = (0..TOKENS).map(|_| nodes(layer.chosen(&mut draw, 2))).sum();
        let drawn = drawn as f64 / TOKENS as f64;
        let found = &of_nodes(&layer.spec(), 8.0)[0];
        let found = found.nodes * found.reach.touched(8);
        assert!((found - 3.98).abs() < 0.01, "{found}");
        assert!((drawn / found - 1.0).abs() < 0.01, "{found} {drawn}");
    }

    /// Experts of unequal popularity, on nodes that have them in any order, and with a capacity.
    #[test]
    fn unequal_experts_reach_about_as_many_nodes_as_drawn_ones_do() {
        let mut draw = Draw(5);
        let (experts, top_k) = (64, 6);
        for (keep, top_k) in [(2, top_k), (4, top_k), (8, top_k), (0, 8)] {
            let layer = Grouped {
                count: 8,
                size: 8,
                keep,
                top_k,
            };
            // An expert comes first with a probability proportional to its weight.
            let weights: Vec<f64> = (0..experts).map(|_| 0.2 + 3.0 * draw.next()).collect();
            let tokens: Vec<Vec<usize>> = (0..TOKENS)
                .map(|_| {
                    let scores = weights.iter().map(|weight| draw.next().powf(1.0 / weight));
                    layer.best(&scores.collect::<Vec<f64>>(), 1)
                })
                .collect();
            let mut counts = vec![0; experts];
            tokens
                .iter()
                .flatten()
                .for_each(|expert| counts[*expert] += 1);
            let routing = RoutedRows::counted(1, experts, top_k, &[counts]).unwrap();
            let routing = routing.limited(&layer.spec());
            let capped = routing.clone().capped(100.0);
            for (nodes, stride) in [(8, 1), (4, 1), (16, 1), (8, 13)] {
                // Experts lie in order, or far from their neighbours.
                let node = |expert: usize| expert * stride % experts / (experts / nodes);
                let reached = |routing: &RoutedRows| -> f64 {
                    let of = |at: usize| {
                        let own = (0..experts).filter(|expert| node(*expert) == at);
                        let rows = own.map(|expert| (expert, routing.rows(0)[expert]));
                        routing.reach(0, rows).touched(top_k)
                    };
                    (0..nodes).map(of).sum()
                };
                let drawn: usize = (tokens.iter())
                    .map(|token| {
                        let mut own: Vec<usize> = token.iter().map(|e| node(*e)).collect();
                        own.sort_unstable();
                        own.dedup();
                        own.len()
                    })
                    .sum();
                let drawn = drawn as f64 / TOKENS as f64;
                let found = reached(&routing);
                assert!(
                    (found / drawn - 1.0).abs() < 0.03,
                    "{keep} groups, {nodes} nodes, {stride}: {found}, drawn {drawn}"
                );
                assert!(reached(&capped) < found);
            }
        }
    }

    /// Distinct groups are only distinguished up to the number of kinds, and no probability is
    /// lost.
    #[test]
    fn many_unlike_groups_are_as_likely_as_few() {
        let kind = |here: f64| GroupKind {
            groups: 1,
            here,
            elsewhere: 8.0 - here,
        };
        let alike = Reach::new(GroupRule::Keep(3), (0..32).map(|_| kind(4.0)));
        let unlike = Reach::new(
            GroupRule::Keep(3),
            (0..32).map(|at| kind(3.0 + at as f64 / 15.5)),
        );
        assert!(unlike.kinds.len() <= MOST_KINDS);
        let [a, b] = [alike, unlike].map(|reach| reach.hits(6, 6));
        for (a, b) in a.iter().zip(&b) {
            assert!((a - b).abs() < 0.01, "{a} {b}");
        }
        assert!((b.iter().sum::<f64>() - 1.0).abs() < 1e-9);
        // Nobody draws from a group without rows.
        let nothing = Reach::new(
            GroupRule::Keep(1),
            [kind(8.0), kind(0.0)].map(|of| GroupKind {
                elsewhere: 0.0,
                ..of
            }),
        );
        assert_eq!(nothing.touched(4), 1.0);
    }

    #[test]
    fn tokens_touch_as_many_groups_as_a_count_of_all_choices_says() {
        // All 3-subsets of 8 experts in 4 groups of 2.
        let mut touched = 0;
        let mut choices = 0;
        for set in 0u32..1 << 8 {
            if set.count_ones() == 3 {
                choices += 1;
                touched += (0..4).filter(|g| set >> (2 * g) & 3 != 0).count();
            }
        }
        let counted = touched as f64 / f64::from(choices);
        assert!((expected_groups(8.0, 3, 4.0) - counted).abs() < 1e-12);
        assert_eq!(expected_groups(8.0, 8, 4.0), 4.0);
    }
}
