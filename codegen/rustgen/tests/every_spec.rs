//! Generates Rust for random valid specs: it has no clashing names, and the plan behind it is that
//! of every target.

use moesaic_kernel::Target;
use moesaic_plan::{LayerPlan, PlanOptions, TensorPlan, TensorRole, plan};
use moesaic_rustgen::{GenerateOptions, generate_source};
use moesaic_spec::testing::sample;
use std::collections::BTreeSet;
use syn::{Fields, File, Item};

const SPECS: u64 = 60;

#[test]
fn generated_text_is_rust_without_clashes() {
    for seed in 0..SPECS {
        let spec = sample(seed);
        let text = generate_source(&spec, &GenerateOptions::default()).unwrap();
        let File { items, .. } = syn::parse_file(&text).unwrap();
        check_items(&items, seed);
        let again = generate_source(&spec, &GenerateOptions::default()).unwrap();
        assert_eq!(text, again, "seed {seed}");
    }
}

fn check_items(items: &[Item], seed: u64) {
    let mut names = BTreeSet::new();
    for item in items {
        let name = match item {
            Item::Struct(item) => {
                check_fields(&item.fields, seed);
                item.ident.to_string()
            }
            Item::Mod(item) => {
                check_items(item.content.as_ref().map_or(&[], |(_, items)| items), seed);
                item.ident.to_string()
            }
            _ => continue,
        };
        assert!(
            names.insert(name.clone()),
            "seed {seed}: two items `{name}`"
        );
    }
}

fn check_fields(fields: &Fields, seed: u64) {
    let mut names = BTreeSet::new();
    for field in fields.iter().filter_map(|field| field.ident.as_ref()) {
        assert!(
            names.insert(field.to_string()),
            "seed {seed}: two fields `{field}`"
        );
    }
}

/// Returns the tensors that users see, which determine the types of a layer.
fn seen(plan: &LayerPlan) -> Vec<TensorPlan> {
    let tensors = plan.tensors.iter();
    tensors
        .filter(|tensor| !matches!(tensor.role, TensorRole::Scratch | TensorRole::Packed))
        .cloned()
        .collect()
}

/// Returns every signature and the tensors that a pass binds to it, which determine the argument
/// structs.
fn signatures(plan: &LayerPlan) -> impl PartialEq + use<> {
    let entries = plan.kernels.iter().flat_map(|kernel| {
        let name = &kernel.name;
        let entries = kernel.entries.iter();
        entries.map(move |e| (name.clone(), e.symbol.clone(), e.params.clone()))
    });
    let steps = plan.steps.iter().map(|step| {
        let names = plan.names(step).map(str::to_string);
        (plan.symbol(step).to_string(), names.collect::<Vec<_>>())
    });
    (entries.collect::<Vec<_>>(), steps.collect::<Vec<_>>())
}

#[test]
fn every_target_has_the_same_tensors() {
    for seed in 0..SPECS {
        let spec = sample(seed);
        let plans = Target::all()
            .into_iter()
            .map(|t| plan(&spec, t, &PlanOptions::default()).unwrap());
        let mut plans = plans.map(|plan| (plan.target, seen(&plan)));
        let (_, first) = plans.next().unwrap();
        for (target, other) in plans {
            assert!(other == first, "seed {seed}: {target} differs");
        }
    }
}

#[test]
fn every_cpu_has_the_same_signatures() {
    for seed in 0..SPECS {
        let spec = sample(seed);
        let cpus = Target::all().into_iter().filter(|t| t.backend() == "cpu");
        let mut plans = cpus.map(|target| plan(&spec, target, &PlanOptions::default()).unwrap());
        let first = signatures(&plans.next().unwrap());
        for other in plans {
            let same = signatures(&other) == first;
            assert!(same, "seed {seed}: {} differs", other.target);
        }
    }
}
