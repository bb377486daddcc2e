//! Published training of whole models.

use super::{
    Check, Errors, PointRole, PublishedRow, PublishedTable, ValidationReport, held_out, percent,
};
use crate::model::{
    Batch, ModelMesh, ModelPrediction, ModelScenario, ModelSpace, RecomputeLevel, StateBytes,
    StepOrder, TieRule, predict_model, search_model,
};
use crate::{ReadError, published, read};
use moesaic_plan::Training;
use moesaic_spec::ExpertForm;
use moesaic_spec::hf::{HfError, import, model_shape, moe_layers};
use serde::Deserialize;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Data {
    model: Vec<Model>,
    point: Vec<Published>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Model {
    name: String,
    /// The part of its config.json that a plan needs.
    config: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Published {
    model: String,
    machine: String,
    world: usize,
    mesh: Mesh,
    virtual_stages: usize,
    micro_batch: usize,
    sequence: usize,
    sequences: usize,
    #[serde(default)]
    tokens_per_second: Option<f64>,
    /// Model TFLOP/s as the source counts them; without it, tokens per second times our FLOP.
    #[serde(default)]
    tflops: Option<f64>,
    /// Whether GEMMs multiply in FP8.
    #[serde(default)]
    fp8: bool,
    /// Whether exchanges of one micro-batch run while another computes.
    #[serde(default)]
    overlap_batches: bool,
    /// Whether the source's recipe for this mesh computes the projections of latent attention again.
    #[serde(default)]
    projections_again: bool,
    /// The bytes of a gradient; 4 if the source does not say.
    #[serde(default)]
    gradient_bytes: Option<f64>,
    /// The release, where another than the file's first is compared.
    #[serde(default)]
    release: Option<String>,
    role: PointRole,
    #[serde(default)]
    known_miss: Option<String>,
    /// The FLOP of a token that the source counts, where they are others than ours.
    #[serde(default)]
    counted: Option<Counted>,
}

/// The parts of a model that a source counts FLOP of.
#[derive(Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
struct Counted {
    /// The gate matrices of experts.
    gate: bool,
    /// Windows of attention; if not, all layers see all tokens.
    windows: bool,
}

impl Counted {
    /// Returns the FLOP of a token, as the source counts them.
    fn flops_per_token(self, scenario: &ModelScenario) -> f64 {
        let mut counted = scenario.clone();
        if !self.gate {
            counted.layer.experts.form = ExpertForm::Plain;
        }
        if !self.windows {
            counted.shape.attention.windowed_layers = 0;
        }
        counted.flops_per_token()
    }
}

#[derive(Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
struct Mesh {
    pp: usize,
    tp: usize,
    ep: usize,
    expert_tp: usize,
}

/// A published mesh with its place among those that a search ranks.
#[derive(Clone, Debug)]
pub struct MeshRank {
    /// The model and the machine.
    pub point: String,
    /// The published mesh.
    pub mesh: ModelMesh,
    /// The place of the mesh, from one; `None` where it does not fit.
    pub place: Option<usize>,
    /// The place by time alone, from one.
    pub by_time: Option<usize>,
    /// The meshes that fit.
    pub of: usize,
    /// The published mesh as the search proposes it.
    pub found: Option<MeshRankLine>,
    /// The first mesh.
    pub first: Option<MeshRankLine>,
    /// The number of meshes that tie for the first place.
    pub tied: usize,
}

/// A line of the ranking that a published mesh is looked for in.
#[derive(Clone, Debug)]
pub struct MeshRankLine {
    /// The mesh.
    pub mesh: ModelMesh,
    /// The fraction that its step is longer than the fastest.
    pub behind: f64,
    /// The fraction of a rank's memory that the plan counts.
    pub memory: f64,
}

/// The bytes of a rank that frameworks, libraries and fragments have: 4 GiB. A plan for a new job leaves
/// more by default (`default_reserve`); these jobs are known to have run.
const RESERVE: f64 = 4.0 * 1024.0 * 1024.0 * 1024.0;

impl Published {
    fn name(&self) -> String {
        let format = if self.fp8 { ", FP8" } else { "" };
        let release = self
            .release
            .as_deref()
            .map_or(String::new(), |of| format!(", {of}"));
        format!(
            "{} on {} {}{format}{release}",
            self.model, self.world, self.machine
        )
    }

    fn mesh(&self) -> ModelMesh {
        let Mesh {
            pp,
            tp,
            ep,
            expert_tp,
        } = self.mesh;
        ModelMesh {
            pp,
            tp,
            ep,
            expert_tp,
        }
    }

    fn scenario(&self, data: &Data) -> Result<ModelScenario, ReadError> {
        let of = |model: &&Model| model.name == self.model;
        let model = data.model.iter().find(of);
        let model = model.ok_or_else(|| ReadError::Other(format!("no model {}", self.model)))?;
        let wrong = |error: HfError| ReadError::Other(format!("{}: {error}", model.name));
        let layers = moe_layers(&model.config).map_err(wrong)?;
        let layer = layers.first().copied().unwrap_or(0);
        let state = StateBytes::default();
        Ok(ModelScenario {
            layer: import(&model.config, layer).map_err(wrong)?.spec,
            shape: model_shape(&model.config).map_err(wrong)?,
            machine: published(&self.machine)?,
            world: self.world,
            training: Some(Training::default()),
            batch: Batch {
                sequence: self.sequence,
                sequences: self.sequences,
            },
            skew: 0.0,
            fp8: self.fp8,
            state: StateBytes {
                gradient: self.gradient_bytes.unwrap_or(state.gradient),
                ..state
            },
            reserve: RESERVE,
        })
    }

    /// Returns the FLOP of a token, as the source counts them.
    fn counted_flops(&self, scenario: &ModelScenario) -> f64 {
        match self.counted {
            Some(counted) => counted.flops_per_token(scenario),
            None => scenario.flops_per_token(),
        }
    }

    /// Returns the published model TFLOP/s, by the FLOP of a token that a plan counts.
    fn tflops(&self, scenario: &ModelScenario) -> f64 {
        let ours = |rate: f64| rate * scenario.flops_per_token() / 1e12;
        let by_tokens = self.tokens_per_second.map_or(0.0, ours);
        match (self.counted, self.tflops) {
            (None, Some(tflops)) => tflops,
            _ => by_tokens,
        }
    }

    fn check(&self, row: &PublishedRow) -> Check {
        let error = row.error();
        let (claim, most) = match self.role {
            PointRole::Calibration => ("the file has the factor of this point, to 2 %", 0.02),
            PointRole::HeldOut => ("within 15 %", 0.15),
        };
        let claim = format!("{}: {claim}", row.point);
        let check = Check::new(claim, error.abs() <= most, percent(error));
        check.known(self.known_miss.as_deref())
    }

    /// Returns the place of the published mesh among all that fit.
    fn rank(&self, data: &Data) -> Result<MeshRank, ReadError> {
        let space = ModelSpace {
            overlap_batches: self.overlap_batches,
            ..ModelSpace::default()
        };
        let scenario = self.scenario(data)?;
        let ranked = search_model(&scenario, &space);
        let own = |mesh: &ModelMesh| *mesh == self.mesh();
        let place = ranked.best.iter().position(|found| own(&found.mesh));
        let ties = ranked.ties.as_ref();
        let by_time = ties.and_then(|ties| ties.by_time.iter().position(own));
        let least = ties.map_or(f64::INFINITY, |ties| ties.fastest.seconds);
        let limit = scenario.machine.compute.memory_gib * f64::from(1u32 << 30);
        let line = |at: usize| {
            let found = ranked.best.get(at)?;
            Some(MeshRankLine {
                mesh: found.mesh,
                behind: found.seconds / least - 1.0,
                memory: found.memory.counted() / limit,
            })
        };
        Ok(MeshRank {
            point: self.name(),
            mesh: self.mesh(),
            place: place.map(|at| at + 1),
            by_time: by_time.map(|at| at + 1),
            of: ranked.best.len(),
            found: place.and_then(line),
            first: line(0),
            tied: ties.map_or(0, |ties| ties.tied),
        })
    }

    /// Predicts the published mesh, with as little computed again as its recipe and memory allow.
    fn predict(&self, scenario: &ModelScenario) -> Option<ModelPrediction> {
        let limit = scenario.machine.compute.memory_gib * f64::from(1u32 << 30);
        let with = |recompute| {
            let schedule = StepOrder {
                micro_batch: self.micro_batch,
                virtual_stages: self.virtual_stages,
                recompute,
                overlap_batches: self.overlap_batches,
            };
            predict_model(scenario, self.mesh(), schedule, None)
        };
        let mut all = ModelSpace::default().recompute;
        let latent = scenario.shape.attention.latent > 0;
        all.retain(|again| latent || *again != RecomputeLevel::Projections);
        // A recipe says what is computed again at least; where none is known, memory decides.
        all.retain(|again| !self.projections_again || *again >= RecomputeLevel::Projections);
        let mut fitting = all.into_iter().filter_map(with);
        fitting.find(|found| found.memory.bytes() <= limit)
    }
}

fn data() -> Result<Data, ReadError> {
    let text = include_str!("../../data/models.toml");
    read::toml("the table of whole models", text)
}

pub(super) fn run(report: &mut ValidationReport) -> Result<(), ReadError> {
    let data = data()?;
    let (mut rows, mut counts) = (Vec::new(), Vec::new());
    for point in &data.point {
        let scenario = point.scenario(&data)?;
        let found = point.predict(&scenario);
        let row = PublishedRow {
            point: point.name(),
            role: point.role,
            measured: point.tflops(&scenario),
            predicted: found.map_or(0.0, |found| found.flops / 1e12),
        };
        report.checks.push(point.check(&row));
        rows.push((row, point.known_miss.is_some()));
        // The published pair of rates says what was counted as FLOP of a token.
        let pair = point.tokens_per_second.zip(point.tflops);
        counts.extend(pair.map(|(rate, tflops)| PublishedRow {
            point: point.name(),
            role: PointRole::HeldOut,
            measured: tflops,
            predicted: rate * point.counted_flops(&scenario) / 1e12,
        }));
        if let Some(count) = counts.last().filter(|_| pair.is_some()) {
            let claim = format!("{}: FLOP of a token to 1 %", count.point);
            let error = count.error();
            report
                .checks
                .push(Check::new(claim, error.abs() <= 0.01, percent(error)));
        }
    }
    let own = rows
        .iter()
        .filter(|(_, missed)| !missed)
        .map(|(row, _)| row);
    let own: Vec<PublishedRow> = own.cloned().collect();
    let errors = Errors::of(held_out(&own));
    report.checks.push(Check::new(
        "whole models together, without those missed: at most 10 % on average",
        errors.mean <= 0.10,
        errors.to_string(),
    ));
    // Plans call steps equal that are closer than this, so the figure is not left to drift.
    let width = TieRule::default().error;
    report.checks.push(Check::new(
        "plans take steps within this mean error for tied, to 0.1 %",
        (errors.mean - width).abs() <= 0.001,
        percent(width),
    ));
    let rows = rows.into_iter().map(|(row, _)| row).collect();
    for (name, rows) in [
        ("whole models, training", rows),
        ("FLOP of their tokens, by published tokens/s", counts),
    ] {
        report.tables.push(PublishedTable {
            name: name.to_string(),
            unit: "TFLOP/s".to_string(),
            constants: "one factor of gb200-nvl72 and gb300-nvl72".to_string(),
            rows,
        });
    }
    Ok(())
}

/// Returns the place of each published mesh among all that fit. It takes long, because every mesh
/// of the ranks is simulated.
///
/// # Errors
/// [`ReadError`] of a table that cannot be read.
pub fn mesh_ranks() -> Result<Vec<MeshRank>, ReadError> {
    let data = data()?;
    let ranks = data.point.iter().map(|point| point.rank(&data));
    ranks.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_meshes_are_among_the_first_five() {
        let data = data().unwrap();
        // docs/SCALE.md has the places of all, with those by time alone.
        for (model, machine, place, by_time) in [
            ("Mixtral-8x7B", "h100-ib", 3, 3),
            ("DeepSeek-V3", "gb200-nvl72", 2, 2),
            ("Qwen3-235B-A22B", "gb300-nvl72", 4, 7),
        ] {
            let of = |point: &&Published| point.model == model && point.machine == machine;
            let point = data.point.iter().find(of).unwrap();
            let found = point.rank(&data).unwrap();
            assert_eq!(
                (found.place, found.by_time),
                (Some(place), Some(by_time)),
                "{found:?}"
            );
            assert!(found.of > 100);
        }
    }
}
