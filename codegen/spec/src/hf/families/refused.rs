//! Families of transformers that the spec cannot express.

use super::super::HfError;

/// A block that the spec cannot express.
struct Refused {
    /// Values of `model_type`.
    names: &'static [&'static str],
    /// The block's property that the spec lacks.
    does: &'static str,
    /// The spec's closest counterpart.
    has: &'static str,
}

const FAMILIES: &[Refused] = &[
    Refused {
        names: &["doge"],
        does: "product keys, two lists of keys whose scores add up, choose single neurons of \
               an embedding table",
        has: "one score per expert, and experts of matrices",
    },
    Refused {
        names: &["vitpose", "vitpose_backbone"],
        does: "experts are a part of the second projection of a dense block, chosen by the data \
               set of an image",
        has: "experts of two or three projections, chosen by a router",
    },
    Refused {
        names: &["zaya"],
        does: "the router is a network of three layers with a state that it hands to the next \
               layer's",
        has: "routers of one projection of the token",
    },
];

/// Returns the error for a refused `model_type`.
pub(super) fn error(model: &str) -> Option<HfError> {
    let family = FAMILIES.iter().find(|f| f.names.contains(&model))?;
    Some(HfError::Family {
        model: model.to_string(),
        does: family.does.to_string(),
        has: family.has.to_string(),
    })
}

/// Returns every refused `model_type` with the property that the spec lacks.
pub(super) fn names() -> impl Iterator<Item = (&'static str, &'static str)> {
    let of = |f: &'static Refused| f.names.iter().map(|name| (*name, f.does));
    FAMILIES.iter().flat_map(of)
}
