//! Random valid specs: what is generated is Rust without clashing names, and
//! the plan it was generated from is that of every target.

use moesaic_kernel::Target;
use moesaic_layers::{GenerateOptions, generate_source};
use moesaic_plan::{LayerPlan, Role, plan};
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

/// What generated code says of a layer: the tensors people see, and every
/// signature.
fn public(plan: &LayerPlan) -> impl PartialEq + use<> {
    let seen = plan
        .tensors
        .iter()
        .filter(|tensor| tensor.role != Role::Scratch);
    let entries = plan.kernels.iter().flat_map(|kernel| {
        let name = &kernel.name;
        kernel
            .entries
            .iter()
            .map(move |e| (name.clone(), e.symbol.clone(), e.params.clone()))
    });
    (
        seen.cloned().collect::<Vec<_>>(),
        entries.collect::<Vec<_>>(),
        plan.steps.clone(),
    )
}

#[test]
fn every_target_has_the_same_tensors_and_signatures() {
    for seed in 0..SPECS {
        let spec = sample(seed);
        let mut plans = Target::all()
            .into_iter()
            .map(|target| plan(&spec, target).unwrap());
        let first = public(&plans.next().unwrap());
        for other in plans {
            assert!(
                public(&other) == first,
                "seed {seed}: {} differs",
                other.target
            );
        }
    }
}
