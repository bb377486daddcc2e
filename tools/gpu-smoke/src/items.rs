//! Everything that a suite runs, one layer after another.

use crate::case::Case;
use crate::cases;
use crate::oracles::{gradients, layers};
use crate::{helloworld, sampled};
use moesaic::spec::LayerSpec;
use moesaic::{DType, Engine, Recompute, Training};
use std::path::{Path, PathBuf};

/// One layer on one input, or a few steps of training.
pub struct Item {
    pub name: String,
    /// The layer.
    pub spec: LayerSpec,
    /// How it is made; `None` for inference.
    pub training: Option<Training>,
    /// Panics where a result is wrong; `false` where f32 scores chose another expert than
    /// the f64 reference does, so that nothing can be compared.
    pub run: Box<dyn Fn(&Engine) -> bool>,
}

/// A list of items.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Suite {
    /// Evaluation against the f64 reference, stage by stage.
    Conformance,
    /// Evaluation and gradients against Hugging Face and Tutel.
    Oracles,
    /// Gradients against the f64 reference, and Tutel's example step by step.
    Training,
}

/// Of a tiny run's items one in so many.
const FEW: usize = 13;

impl Suite {
    pub const ALL: [Suite; 3] = [Suite::Conformance, Suite::Oracles, Suite::Training];

    /// Its items, smallest first; few of them when `tiny`. `data` holds the fixtures.
    pub fn items(self, data: &Path, tiny: bool) -> Vec<Item> {
        let mut items = match self {
            Suite::Conformance => conformance(),
            Suite::Oracles => oracles(data),
            Suite::Training => training(),
        };
        items.sort_by_key(|item| weights(&item.spec));
        if !tiny {
            return items;
        }
        let few = items.into_iter().step_by(FEW);
        few.filter(|item| weights(&item.spec) < 1 << 20).collect()
    }
}

/// Elements of the experts' matrices.
fn weights(spec: &LayerSpec) -> usize {
    let shape = &spec.shape;
    shape.model_dim * shape.hidden_dim * shape.experts
}

fn item(
    what: &str,
    spec: &LayerSpec,
    training: Option<Training>,
    run: impl Fn(&Engine) -> bool + 'static,
) -> Item {
    let shape = &spec.shape;
    let sizes = format!(
        "{} experts of {} x {}, top {}, {}",
        shape.experts, shape.model_dim, shape.hidden_dim, shape.top_k, spec.precision.activations
    );
    Item {
        name: format!("{what}: {sizes}"),
        spec: spec.clone(),
        training,
        run: Box::new(run),
    }
}

/// Nothing to be passed over.
fn held(run: impl Fn(&Engine) + 'static) -> impl Fn(&Engine) -> bool + 'static {
    move |engine| {
        run(engine);
        true
    }
}

fn evaluated(what: &str, case: Case) -> Item {
    let what = format!("{what}, T = {}", case.input.tokens);
    let spec = case.spec.clone();
    item(&what, &spec, None, held(move |engine| case.check(engine)))
}

fn conformance() -> Vec<Item> {
    let groups = [
        ("sizes", cases::shapes()),
        ("one expert for all", cases::crowded()),
        ("placement", cases::routed()),
        ("random layer", cases::random()),
    ];
    let groups = groups.into_iter();
    let mut items: Vec<Item> = groups
        .flat_map(|(what, cases)| cases.into_iter().map(move |case| evaluated(what, case)))
        .collect();
    for spec in cases::selecting() {
        let cases = [0, 1, 45].map(|tokens| Case::random(&spec, tokens, 5));
        items.extend(cases.map(|case| evaluated("selection", case)));
    }
    let mut rounded = cases::small(64, 72, 5, 2);
    rounded.precision.tf32 = true;
    items.push(evaluated("tf32", Case::random(&rounded, 33, 7)));
    let seeds = (500..536).filter(|seed| seed % 3 == 0);
    items.extend(seeds.map(|seed| {
        let run = held(move |engine: &Engine| sampled::forward(seed, engine));
        item(&format!("seed {seed}"), &cases::tiny(seed), None, run)
    }));
    items
}

fn trains(recompute: Recompute) -> Option<Training> {
    Some(Training { recompute })
}

fn training() -> Vec<Item> {
    let none = trains(Recompute::None);
    let mut items = Vec::new();
    for case in cases::trained_shapes() {
        let (what, spec) = (
            format!("sizes, T = {}", case.input.tokens),
            case.spec.clone(),
        );
        let run = held(move |engine: &Engine| case.check_training(engine, Recompute::None));
        items.push(item(&what, &spec, none, run));
    }
    for (case, recompute) in cases::trained_options() {
        let spec = case.spec.clone();
        let run = held(move |engine: &Engine| case.check_training(engine, recompute));
        items.push(item("options", &spec, trains(recompute), run));
    }
    for spec in cases::drawing() {
        let layer = spec.clone();
        let run = held(move |engine: &Engine| sampled::gradients_of(&layer, engine));
        items.push(item("what training draws", &spec, none, run));
    }
    for seed in (500..524).filter(|seed| seed % 3 != 0) {
        let (what, spec) = (format!("seed {seed}"), cases::tiny(seed));
        items.push(match seed % 3 {
            1 => item(&what, &cases::quiet(spec), none, move |engine| {
                sampled::trained(seed, engine)
            }),
            _ => item(&what, &in_f32(spec), none, move |engine| {
                sampled::drawn(seed, engine)
            }),
        });
    }
    items.extend(tutels());
    items
}

/// As [`sampled::drawn`] changes it.
fn in_f32(mut spec: LayerSpec) -> LayerSpec {
    spec.precision.weights = DType::F32;
    spec.precision.activations = DType::F32;
    spec.precision.tf32 = false;
    spec
}

/// A hundred steps of each recorded run of Tutel's example.
fn tutels() -> impl Iterator<Item = Item> {
    helloworld::recorded()
        .enumerate()
        .map(|(number, (options, run))| {
            let train = held(move |engine: &Engine| {
                let (options, run) = helloworld::recorded().nth(number).expect("it was there");
                run.train(engine, 100, 5, options);
            });
            let what = format!("Tutel's example, {options}");
            item(&what, &run.spec, Some(Training::default()), train)
        })
}

fn oracles(data: &Path) -> Vec<Item> {
    let training = Some(Training::default());
    let mut items = Vec::new();
    for folder in ["hf", "hf_more", "families", "families_limits"] {
        for dir in layers::fixtures(&data.join(folder)) {
            let spec = layers::import(&dir).spec;
            items.push(item(
                &named(&dir, ""),
                &spec,
                None,
                fixture(&dir, layers::hugging_face),
            ));
            let gradients = match folder {
                "hf" => gradients::hugging_face,
                "families" | "families_limits" => gradients::family,
                _ => continue,
            };
            let what = named(&dir, ", gradients");
            items.push(item(&what, &spec, training, fixture(&dir, gradients)));
        }
    }
    for file in layers::fixtures(&data.join("tutel")) {
        let spec = layers::Tutel::open(&file).spec();
        items.push(item(
            &named(&file, ""),
            &spec,
            None,
            fixture(&file, layers::tutel),
        ));
        let what = named(&file, ", gradients");
        items.push(item(
            &what,
            &spec,
            training,
            fixture(&file, gradients::tutel),
        ));
    }
    items
}

fn fixture(path: &Path, check: fn(&Engine, &Path)) -> impl Fn(&Engine) -> bool + 'static {
    let path: PathBuf = path.to_path_buf();
    held(move |engine| check(engine, &path))
}

/// `families/aria, gradients`.
fn named(path: &Path, what: &str) -> String {
    let part = |path: Option<&Path>| {
        let name = path.and_then(Path::file_stem);
        name.unwrap_or_default().to_string_lossy().into_owned()
    };
    format!("{}/{}{what}", part(path.parent()), part(Some(path)))
}
