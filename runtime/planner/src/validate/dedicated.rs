//! Published exchanges of libraries with dedicated kernels.

use super::{Check, Errors, PointRole, PublishedRow, PublishedTable, ValidationReport, held_out};
use crate::exchange::{LevelLoad, Phase};
use crate::fit::{Fit, Point, fit};
use crate::{Machine, ReadError, expected_groups, published, read};
use serde::Deserialize;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Data {
    set: Vec<Set>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Set {
    name: String,
    model: Model,
    unit: String,
    tokens: f64,
    top_k: usize,
    #[serde(default)]
    experts: f64,
    #[serde(default)]
    nodes_of_a_token: Option<f64>,
    row_bytes: f64,
    /// The set that constants are fitted to, if not this one.
    #[serde(default)]
    constants_of: Option<String>,
    /// Whether other kernels run while rows are in flight.
    #[serde(default)]
    overlapped: bool,
    #[serde(default)]
    known_miss: Option<String>,
    point: Vec<Published>,
}

#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Model {
    /// Every copy goes directly to its rank.
    Direct,
    /// A token crosses to a node once and is forwarded there, both at the same time.
    Once,
    /// The same where only the network is the bottleneck.
    Network,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Published {
    ranks: usize,
    value: f64,
    role: PointRole,
}

const PER_NODE: f64 = 8.0;

impl Set {
    /// Returns the bytes of all copies, as sources count them.
    fn logical(&self, ranks: usize) -> f64 {
        let copies = match self.model {
            Model::Direct => self.top_k as f64,
            _ => self.nodes(ranks),
        };
        self.tokens * copies * self.row_bytes
    }

    /// Returns the nodes that a token reaches.
    fn nodes(&self, ranks: usize) -> f64 {
        let nodes = ranks as f64 / PER_NODE;
        match self.nodes_of_a_token {
            Some(most) => most.min(nodes),
            None => expected_groups(self.experts, self.top_k, nodes),
        }
    }

    /// Returns the bytes inside the node and between nodes.
    fn bytes(&self, ranks: usize) -> (f64, f64) {
        let n = ranks as f64;
        let away = 1.0 - PER_NODE / n;
        let token = self.tokens * self.row_bytes;
        match self.model {
            Model::Direct => (0.0, token * self.top_k as f64 * away),
            Model::Network => (0.0, token * self.nodes(ranks) * away),
            Model::Once => {
                // A token's nodes are all equally likely.
                let of_nodes = self.experts * self.nodes(ranks) / (n / PER_NODE);
                let ranks_of_nodes = PER_NODE * self.nodes(ranks);
                let copies = expected_groups(of_nodes, self.top_k, ranks_of_nodes);
                (token * copies, token * self.nodes(ranks) * away)
            }
        }
    }

    fn phase(&self, ranks: usize) -> Phase {
        let (inside, outside) = self.bytes(ranks);
        let mut phase = Phase {
            side_by_side: true,
            ..Phase::default()
        };
        phase.loads[0] = LevelLoad::even(PER_NODE - 1.0, inside);
        phase.loads[1] = LevelLoad::even(ranks as f64 - PER_NODE, outside);
        phase
    }

    /// Returns the predicted seconds of an exchange of so many ranks.
    fn predicted(&self, machine: &Machine, ranks: usize) -> f64 {
        let alone = machine.phase(&self.phase(ranks)).seconds;
        let slowdown = f64::from(u8::from(self.overlapped));
        alone * (1.0 + slowdown * machine.overlap.transfer_slowdown)
    }

    /// Returns the seconds of a published point.
    fn seconds(&self, point: &Published) -> f64 {
        match &*self.unit {
            "us" => point.value * 1e-6,
            _ => self.logical(point.ranks) / (point.value * 1e9),
        }
    }

    /// Returns the machine with fitted constants.
    fn machine(&self, constants: &[f64]) -> Result<Machine, ReadError> {
        let mut machine = published("h800")?;
        for level in &mut machine.levels {
            // Without per-message costs: the fit has two constants, and few points to find them.
            (level.alpha_us, level.half_size_kib, level.half_peers) = (0.0, 0.0, 0.0);
        }
        match self.model {
            // Low-latency kernels are bound by a fixed time and the network; the others by two
            // bandwidths.
            Model::Direct => machine.levels[1].alpha_us = constants[0] * 1e6,
            _ => machine.levels[0].bandwidth_gbs = 1e-9 / constants[0],
        }
        machine.levels[1].bandwidth_gbs = 1e-9 / constants[1];
        Ok(machine)
    }

    fn fit(&self) -> Fit {
        let of = |point: &Published| {
            let (inside, outside) = self.bytes(point.ranks);
            Point {
                terms: vec![inside, outside],
                measured: self.seconds(point),
            }
        };
        let points = self
            .point
            .iter()
            .filter(|point| point.role == PointRole::Calibration);
        let points: Vec<Point> = points.map(of).collect();
        match self.model {
            Model::Direct => fit(&[30e-6, 1.0 / 45e9], &points, |c, terms| {
                c[0] + c[1] * terms[1]
            }),
            _ => fit(&[1.0 / 155e9, 1.0 / 45e9], &points, |c, terms| {
                (c[0] * terms[0]).max(c[1] * terms[1])
            }),
        }
    }

    /// Returns the set whose points give the constants.
    fn fitted_by<'d>(&'d self, data: &'d Data) -> Result<&'d Set, ReadError> {
        let Some(name) = &self.constants_of else {
            return Ok(self);
        };
        let found = data.set.iter().find(|set| set.name == *name);
        found.ok_or_else(|| ReadError::Other(format!("no set {name}")))
    }

    /// Returns the largest error that is claimed: a fit of another machine says less.
    fn most(&self) -> f64 {
        if self.constants_of.is_some() {
            0.20
        } else {
            0.10
        }
    }

    fn constants(&self, constants: &[f64]) -> String {
        let network = 1e-9 / constants[1];
        match self.model {
            Model::Direct => format!("{:.1} us, {network:.1} GB/s a NIC", constants[0] * 1e6),
            Model::Once => {
                let inside = 1e-9 / constants[0];
                format!("{inside:.1} GB/s inside a node, {network:.1} GB/s a NIC")
            }
            Model::Network => format!("{network:.1} GB/s a NIC"),
        }
    }
}

pub(super) fn run(report: &mut ValidationReport) -> Result<(), ReadError> {
    let text = include_str!("../../data/dedicated.toml");
    let data: Data = read::toml("the table of dedicated exchanges", text)?;
    let mut all = Vec::new();
    for set in &data.set {
        let found = set.fitted_by(&data)?.fit();
        let machine = set.machine(&found.constants)?;
        let row = |point: &Published| {
            let seconds = set.predicted(&machine, point.ranks);
            PublishedRow {
                point: format!("{} GPUs", point.ranks),
                role: point.role,
                measured: point.value,
                predicted: match &*set.unit {
                    "us" => seconds * 1e6,
                    _ => set.logical(point.ranks) / seconds / 1e9,
                },
            }
        };
        let rows: Vec<PublishedRow> = set.point.iter().map(row).collect();
        let errors = Errors::of(held_out(&rows));
        let found_text = errors.to_string();
        let most = set.most();
        let claim = format!(
            "{}: at most {:.0} % on what was held out",
            set.name,
            100.0 * most
        );
        let check = Check::new(claim, errors.worst <= most, found_text);
        report.checks.push(check.known(set.known_miss.as_deref()));
        // Known misses are listed by themselves and must not hide in an average.
        if set.known_miss.is_none() && set.constants_of.is_none() {
            all.extend(held_out(&rows).cloned());
        }
        report.tables.push(PublishedTable {
            name: set.name.clone(),
            unit: set.unit.clone(),
            constants: set.constants(&found.constants),
            rows,
        });
    }
    let errors = Errors::of(&all);
    report.checks.push(Check::new(
        "dedicated exchanges together: at most 5 % on average",
        errors.mean <= 0.05,
        errors.to_string(),
    ));
    Ok(())
}
