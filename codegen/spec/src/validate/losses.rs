//! Auxiliary losses.

use super::{Range, Real, quoted};
use crate::{LayerSpec, Loss, LossKind, Problem};

pub(super) fn check(spec: &LayerSpec, problems: &mut Vec<Problem>) {
    for (index, loss) in spec.losses.iter().enumerate() {
        let key = |part: &str| format!("losses[{index}].{part}");
        Real::NotNegative.check(&key("coefficient"), loss.coefficient, problems);
        twice(spec, index, problems);
        if !spec.has_logits() {
            problems.push(no_logits(&key("kind"), loss));
        } else if loss.kind.needs_noise() && spec.router.noise <= 0.0 {
            problems.push(no_noise(&key("kind"), loss));
        }
        sequence_length(&key("sequence_length"), &key("kind"), loss, problems);
    }
}

fn twice(spec: &LayerSpec, index: usize, problems: &mut Vec<Problem>) {
    let loss = &spec.losses[index];
    let mut earlier = spec.losses[..index].iter();
    if let Some(first) = earlier.position(|other| other.kind == loss.kind) {
        let message = format!("two losses of kind {}", quoted(&loss.kind));
        let problem = Problem::new(format!("losses[{index}].kind"), message)
            .label("second")
            .with(format!("losses[{first}].kind"), "first");
        problems
            .push(problem.help("results are named by kind: remove one, add up the coefficients"));
    }
}

fn no_logits(key: &str, loss: &Loss) -> Problem {
    let message = format!("a loss of kind {} needs router logits", quoted(&loss.kind));
    Problem::new(key, message)
        .label("computed from the router's probabilities")
        .with("router.kind", "no logits here")
        .with("router.score", "no logits here")
        .help("remove the loss, or use kind = \"linear\" in [router]")
}

fn no_noise(key: &str, loss: &Loss) -> Problem {
    let kind = quoted(&loss.kind);
    Problem::new(
        key,
        format!("a loss of kind {kind} needs `router.noise` above 0"),
    )
    .label("its load is a probability under that noise")
    .with("router.noise", "0 here")
    .help("add noise = 1.0 to [router], or use kind = \"gshard\"")
}

fn sequence_length(key: &str, kind: &str, loss: &Loss, problems: &mut Vec<Problem>) {
    let Some(length) = loss.sequence_length else {
        return;
    };
    Range::dim(key, length).check(problems);
    if loss.kind != LossKind::Sequence {
        let message = format!(
            "`sequence_length` has no effect on a loss of kind {}",
            quoted(&loss.kind)
        );
        let problem = Problem::new(key, message)
            .label("tokens of each sequence")
            .with(kind, "not over sequences");
        problems.push(problem.help("remove it, or use kind = \"sequence\""));
    }
}
