//! Plans for whole models.

use super::model_report::Compared;
use super::{PlanArgs, model_page, model_report};
use crate::console::Console;
use crate::failure::{Failure, Result};
use crate::mesh::{self, Part};
use crate::units;
use clap::Args;
use moesaic::LayerSpec;
use moesaic::planner::model::{
    Batch, ModelMesh, ModelPrediction, ModelRanked, ModelScenario, ModelSpace, StateBytes,
    check_mesh, default_reserve, doubled, faster, model_timeline, search_model,
};
use moesaic::planner::{self, RoutedRows};
use moesaic::spec::hf::{AttentionShape, ModelShape};
use moesaic::weights::write_whole;
use std::path::PathBuf;

/// The arguments of a plan for a whole model.
#[derive(Args, Debug)]
pub struct ModelPlanArgs {
    /// Plan a model with this many such layers, instead of a layer alone
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub layers: Option<u32>,
    /// All parameters of the model, such as 671e9 or 671B; those beyond its layers with experts
    /// are spread over the layers
    #[arg(long, value_name = "N", value_parser = parse_count, requires = "layers")]
    params: Option<f64>,
    /// Count this many tokens in a sequence of a model (4096)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    sequence: Option<u32>,
    /// Take this many sequences of all ranks for a step of a model (8 for each rank)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    batch: Option<u32>,
    /// Put this many sequences into a micro-batch of a model (the fastest of 1, 2, 4, 8)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    micro_batch: Option<u16>,
    /// Predict a model on this mesh alone
    #[arg(long, value_name = "pp=N,tp=N,ep=N,expert_tp=N", value_parser = parse_mesh)]
    model_mesh: Option<ModelMesh>,
    /// Also show what a step of a model on this mesh is made of, beside the first
    #[arg(long, value_name = "pp=N,tp=N,ep=N,expert_tp=N", value_parser = parse_mesh, conflicts_with = "model_mesh")]
    compare: Option<ModelMesh>,
    /// Run the exchanges of one micro-batch of a model while another computes
    #[arg(long)]
    overlap_batches: bool,
    /// Multiply in FP8 in a model, but for scores and the output head; operands are cast before
    #[arg(long)]
    fp8: bool,
    /// Keep this much memory of each rank from the layers of a model, and rank by time alone (8 % of
    /// its memory and 4GiB at least; of meshes that tie, those that leave a fifth free come first)
    #[arg(long, value_name = "SIZE", value_parser = units::parse_bytes)]
    reserve: Option<u64>,
    /// Count this many bytes for a weight of a model, such as 1 in FP8 (those of its type)
    #[arg(long, value_name = "N", value_parser = parse_bytes_each)]
    weight_bytes: Option<f64>,
    /// Count this many bytes for the gradient of a parameter of a model (4)
    #[arg(long, value_name = "N", value_parser = parse_bytes_each)]
    gradient_bytes: Option<f64>,
    /// Count this many bytes for the optimizer's state of a parameter of a model (12)
    #[arg(long, value_name = "N", value_parser = parse_bytes_each)]
    optimizer_bytes: Option<f64>,
    /// Also write the plan of a model as a page
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
}

impl ModelPlanArgs {
    /// Returns an option that is of models alone, if one is given.
    fn given(&self) -> Option<&'static str> {
        let all = [
            ("--sequence", self.sequence.is_some()),
            ("--batch", self.batch.is_some()),
            ("--micro-batch", self.micro_batch.is_some()),
            ("--model-mesh", self.model_mesh.is_some()),
            ("--compare", self.compare.is_some()),
            ("--overlap-batches", self.overlap_batches),
            ("--fp8", self.fp8),
            ("--reserve", self.reserve.is_some()),
            ("--weight-bytes", self.weight_bytes.is_some()),
            ("--gradient-bytes", self.gradient_bytes.is_some()),
            ("--optimizer-bytes", self.optimizer_bytes.is_some()),
            ("--html", self.html.is_some()),
        ];
        all.into_iter()
            .find_map(|(name, there)| there.then_some(name))
    }
}

/// Returns whether a model is asked for, and not a layer. Refuses options of the other.
pub fn is_asked(args: &PlanArgs) -> Result<bool> {
    let whole = args.layer.model.hf.is_some() && args.layer.layer.is_none();
    if args.model.layers.is_some() || whole {
        let layer = [
            ("--tokens", args.tokens.is_some()),
            ("--counts", args.counts.is_some()),
            ("--placement", args.placement.is_some()),
            ("--mesh", args.mesh.is_some()),
        ];
        let given = layer.into_iter().find(|(_, there)| *there);
        return match given {
            None => Ok(true),
            Some((name, _)) => {
                let message = format!("{name} is of one layer, and a model is asked for");
                Err(Failure::input(message).hint(
                    "--layer N without --layers plans one layer of --hf; --sequence, --batch and \
                     --model-mesh are of models",
                ))
            }
        };
    }
    match args.model.given() {
        None => Ok(false),
        Some(name) => {
            let message = format!("{name} is of a model, and one layer is asked for");
            Err(Failure::input(message)
                .hint("--layers N plans a model of N such layers, --hf without --layer a model"))
        }
    }
}

/// Predicts the configurations of a model, ranks them and prints the best.
pub fn execute(args: &PlanArgs, console: &Console) -> Result {
    let scenario = args.scenario(console)?;
    let space = args.space();
    let ranked = search_model(&scenario, &space);
    let Some(best) = ranked.best.first() else {
        return Err(nothing(&scenario, &ranked, &space));
    };
    let compare = args.model.compare;
    let compared = compare.map(|mesh| compared(&scenario, &space, &ranked, mesh));
    let compared = compared.transpose()?;
    if let Some(path) = &args.trace {
        let text = planner::chrome(&model_timeline(&scenario, best)).to_string();
        write_whole(path, text.as_bytes()).map_err(|error| Failure::unwritable(path, &error))?;
    }
    // Where the first leads a tie by its headroom, the second may be faster as it is.
    let slower = |second: &&ModelPrediction| second.seconds >= best.seconds;
    let second = ranked.best.get(1).filter(slower);
    let report = model_report::ModelReport {
        scenario: &scenario,
        ranked: &ranked,
        top: usize::from(args.top),
        best,
        faster: second.map_or_else(Vec::new, |second| faster(&scenario, best, second)),
        doubled: doubled(&scenario, best),
        compared,
    };
    if let Some(path) = &args.model.html {
        let page = model_page::render(&report, &model_timeline(&scenario, best));
        write_whole(path, page.as_bytes()).map_err(|error| Failure::unwritable(path, &error))?;
    }
    if args.form.json {
        console.json(&report.json())
    } else {
        console.report(&report.text(&console.out))
    }
}

/// Predicts a mesh that is shown beside the first.
fn compared(
    scenario: &ModelScenario,
    space: &ModelSpace,
    ranked: &ModelRanked,
    mesh: ModelMesh,
) -> Result<Compared> {
    if let Some(at) = ranked.best.iter().position(|found| found.mesh == mesh) {
        return Ok(Compared {
            place: Some(at + 1),
            by_time: ranked.ties.as_ref().and_then(|ties| {
                let at = ties.by_time.iter().position(|own| *own == mesh);
                at.map(|at| at + 1)
            }),
            found: ranked.best[at].clone(),
        });
    }
    let alone = ModelSpace {
        mesh: Some(mesh),
        ..space.clone()
    };
    let mut own = search_model(scenario, &alone);
    if own.best.is_empty() {
        return Err(nothing(scenario, &own, &alone));
    }
    Ok(Compared {
        place: None,
        by_time: None,
        found: own.best.swap_remove(0),
    })
}

fn nothing(scenario: &ModelScenario, ranked: &ModelRanked, space: &ModelSpace) -> Failure {
    let world = scenario.world;
    let gib = scenario.machine.compute.memory_gib;
    if let Some(small) = &ranked.smallest {
        let [parts @ .., (_, all)] = model_report::parts(&small.memory)
            .map(|(name, bytes)| (name, units::bytes(bytes as u64)));
        let parts = parts.map(|(name, bytes)| format!("{name} {bytes}"));
        let message = match space.mesh {
            Some(mesh) => format!("{mesh} does not fit this model in {gib} GiB: it needs {all}"),
            None => format!(
                "no mesh of {} fits this model in {gib} GiB: {} needs {all}",
                units::count(world, "rank"),
                small.mesh
            ),
        };
        let message = format!("{message}\n  {}", parts.join(", "));
        let remedies = "a machine with more memory, fewer --optimizer-bytes or a smaller --reserve";
        return Failure::input(message).hint(
            match space
                .mesh
                .is_none()
                .then(|| enough(scenario, space))
                .flatten()
            {
                Some(ranks) => format!("{ranks} ranks hold it, or {remedies}"),
                None => format!("more ranks, {remedies}"),
            },
        );
    }
    if ranked.possible > 0 {
        let message = format!("one layer of this model alone does not fit in {gib} GiB a rank");
        return Failure::input(message).hint("more ranks, or a machine with more memory, hold it");
    }
    let sizes = space.micro_batches.iter();
    let wrong = space.mesh.and_then(|mesh| {
        sizes
            .filter_map(|size| check_mesh(scenario, mesh, *size).err())
            .next()
    });
    match wrong {
        Some(error) => Failure::input(error),
        None => Failure::input(format!("{world} ranks cannot share this model's step")).hint(
            "--batch is a multiple of the copies (ranks / pp / tp) times the sequences of a \
             micro-batch",
        ),
    }
}

/// Returns the least of two, four, … times as many ranks on which some mesh fits.
fn enough(scenario: &ModelScenario, space: &ModelSpace) -> Option<usize> {
    let sequences = scenario.batch.sequences / scenario.world;
    let worlds = (1..=4).map(|doublings| scenario.world << doublings);
    let known = |world: &usize| scenario.machine.check_ranks(*world).is_ok() && *world <= 8192;
    worlds.take_while(known).find(|&world| {
        let more = ModelScenario {
            world,
            batch: Batch {
                sequences: sequences.max(1) * world,
                ..scenario.batch
            },
            ..scenario.clone()
        };
        // Smaller micro-batches need less memory.
        let space = ModelSpace {
            mesh: None,
            micro_batches: vec![1],
            ..space.clone()
        };
        !search_model(&more, &space).best.is_empty()
    })
}

impl PlanArgs {
    fn scenario(&self, console: &Console) -> Result<ModelScenario> {
        let numbers = Some("meshes that cut experts are compared, too");
        let spec = self.layer.load_first(numbers, console)?.spec;
        let machine = self.machine(console)?;
        let own = &self.model;
        let world = self.world as usize;
        machine.check_ranks(world).map_err(Failure::input)?;
        let skew = self.skew.unwrap_or(0.0);
        // The same error as for a layer, before anything is simulated.
        RoutedRows::zipf_of(&spec, 1, skew).map_err(Failure::input)?;
        if own.fp8 && machine.fp8_rate().is_none() {
            let message = format!("--fp8: machine {} has no rate of FP8 GEMMs", machine.name);
            return Err(Failure::input(message).hint("its file needs gemm_tflops.fp8"));
        }
        let state = StateBytes::default();
        let reserve = own
            .reserve
            .map_or(default_reserve(&machine), |bytes| bytes as f64);
        Ok(ModelScenario {
            shape: self.shape(&spec)?,
            layer: spec,
            machine,
            world,
            training: self.training.get(),
            batch: Batch {
                sequence: own.sequence.unwrap_or(4096) as usize,
                sequences: own.batch.map_or(8 * world, |batch| batch as usize),
            },
            skew,
            fp8: own.fp8,
            state: StateBytes {
                weight: own.weight_bytes,
                gradient: own.gradient_bytes.unwrap_or(state.gradient),
                optimizer: own.optimizer_bytes.unwrap_or(state.optimizer),
            },
            reserve,
        })
    }

    fn space(&self) -> ModelSpace {
        let space = ModelSpace::default();
        let own = &self.model;
        ModelSpace {
            mesh: own.model_mesh,
            micro_batches: match own.micro_batch {
                Some(size) => vec![usize::from(size)],
                None => space.micro_batches,
            },
            comm_dtypes: self.comm_dtypes.clone(),
            overlap_batches: own.overlap_batches,
            // Whoever names the reserve knows what the job needs beyond what is counted, for which
            // the headroom of the rule is a guess.
            ties: space.ties.filter(|_| own.reserve.is_none()),
            ..space
        }
    }

    fn shape(&self, spec: &LayerSpec) -> Result<ModelShape> {
        let shape = match self.model.layers {
            Some(layers) => self.counted_shape(spec, layers as usize),
            None => self.layer.model_shape(),
        }?;
        match shape.layers() {
            // Every layer is simulated, and no model has a tenth of this.
            layers @ 10_001.. => {
                let message = format!("{layers} layers are more than the 10000 that are planned");
                Err(Failure::input(message).hint("num_hidden_layers is the model's depth"))
            }
            _ => Ok(shape),
        }
    }

    /// Returns a model of so many layers, over which all other parameters are spread.
    fn counted_shape(&self, spec: &LayerSpec, layers: usize) -> Result<ModelShape> {
        let mut shape = ModelShape {
            width: spec.shape.model_dim,
            moe_layers: layers,
            dense_layers: 0,
            dense_width: 0,
            attention: AttentionShape::default(),
            vocabulary: 0,
            tied: false,
        };
        let tensors = moesaic::spec::canonical_tensors(spec);
        let sizes = tensors.iter().map(|tensor| &tensor.shape);
        let count = |sizes: &Vec<usize>| sizes.iter().map(|size| *size as f64).product::<f64>();
        let own = layers as f64 * sizes.map(count).sum::<f64>();
        if let Some(all) = self.model.params {
            if all < own {
                let message = format!(
                    "--params {} is less than {} have: {}",
                    model_report::count(all),
                    units::count(layers, "such layer"),
                    model_report::count(own)
                );
                return Err(Failure::input(message).hint("--params is of the whole model"));
            }
            shape.attention.parameters = (all - own) / layers as f64;
        }
        Ok(shape)
    }
}

/// The most parameters that a model may have. Bytes of more overflow.
const MOST_PARAMETERS: f64 = 1e15;

/// Parses a number of parameters such as `671e9`, `671B`, `30.5b` or `1T`.
fn parse_count(text: &str) -> std::result::Result<f64, String> {
    let text = text.to_ascii_uppercase();
    let ends = [("M", 1e6), ("B", 1e9), ("T", 1e12), ("", 1.0)];
    let mut ends = ends.into_iter();
    let found = ends.find_map(|(end, factor)| Some((text.strip_suffix(end)?, factor)));
    let (number, factor) = found.unwrap_or((&text, 1.0));
    match number.trim().parse::<f64>() {
        Ok(number) if number * factor > MOST_PARAMETERS => {
            Err("a model has at most 1e15 parameters".to_string())
        }
        Ok(number) if number > 0.0 => Ok(number * factor),
        _ => Err("write it as 671e9, 671B or 1T".to_string()),
    }
}

fn parse_bytes_each(text: &str) -> std::result::Result<f64, String> {
    match text.parse::<f64>() {
        Ok(bytes) if (0.0..=64.0).contains(&bytes) => Ok(bytes),
        _ => Err("bytes of a parameter are from 0 to 64".to_string()),
    }
}

/// Parses a mesh such as `pp=4,ep=64`; degrees that are not named are 1.
fn parse_mesh(text: &str) -> std::result::Result<ModelMesh, String> {
    let mut mesh = ModelMesh {
        pp: 1,
        tp: 1,
        ep: 1,
        expert_tp: 1,
    };
    for part in mesh::parts(text) {
        let Part { text, name, value } = part?;
        let degree = match name {
            "pp" => &mut mesh.pp,
            "tp" => &mut mesh.tp,
            "ep" => &mut mesh.ep,
            "expert_tp" => &mut mesh.expert_tp,
            other => return Err(format!("`{other}` is none of pp, tp, ep, expert_tp")),
        };
        *degree = match value.parse() {
            Ok(number @ 1..) => number,
            _ => return Err(format!("`{text}` is not NAME=NUMBER, as in pp=4")),
        };
    }
    Ok(mesh)
}
