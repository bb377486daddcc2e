//! The router's rules for selections beyond top-k, and for training.

use super::router::select_word;
use super::{Range, Real, clash, quoted};
use crate::{
    CapacityMode, Chooser, LayerSpec, LossKind, MAX_BALANCED_EXPERTS, MAX_SINKHORN_ROUNDS,
    NoiseKind, Problem, Router, Select,
};

pub(super) fn check(spec: &LayerSpec, problems: &mut Vec<Problem>) {
    numbers(&spec.router, problems);
    noise(spec, problems);
    entropy(spec, problems);
    if spec.router.blocks.is_some() {
        few_experts(spec, problems);
    }
    match spec.router.select {
        Select::ExpertChoice(_) => {
            few_experts(spec, problems);
            expert_choice(spec, problems);
        }
        Select::Sinkhorn(rounds) => {
            few_experts(spec, problems);
            sinkhorn(&spec.router, rounds, problems);
        }
        Select::TopK | Select::SparseMixer(_) | Select::PerGroup(_) => {}
    }
}

/// Limits the experts of selections over all tokens, whose kernels use one warp per token.
fn few_experts(spec: &LayerSpec, problems: &mut Vec<Problem>) {
    let because = "the most experts of which expert choice, Sinkhorn and blocks choose";
    let range = Range {
        key: "shape.experts",
        value: spec.scored_experts(),
        least: 1,
        most: MAX_BALANCED_EXPERTS,
        because,
    };
    if spec.scored_experts() <= crate::MAX_EXPERTS {
        range.check(problems);
    }
}

fn numbers(router: &Router, problems: &mut Vec<Problem>) {
    if let Some(entropy) = &router.entropy {
        let temperature = entropy.temperature;
        Real::Any.check("router.entropy.temperature", temperature, problems);
        Real::NotNegative.check("router.entropy.load", entropy.load, problems);
    }
    if let Select::ExpertChoice(share) = router.select {
        Real::Positive.check("router.select", share, problems);
    }
}

/// Returns true for noise that only selection sees.
fn selects_by_noise(router: &Router) -> bool {
    matches!(
        router.noise_kind,
        NoiseKind::Gumbel | NoiseKind::GumbelSecond
    )
}

fn noise(spec: &LayerSpec, problems: &mut Vec<Problem>) {
    let router = &spec.router;
    let kind = || quoted(&router.noise_kind);
    let key = "router.noise_kind";
    if router.noise_kind != NoiseKind::Gaussian && router.noise == 0.0 {
        let amount = ("router.noise", "0".to_string());
        clash(problems, key, kind(), amount, "there is no noise");
        return;
    }
    if let (NoiseKind::Learned, Some(cap)) = (router.noise_kind, router.logit_softcap) {
        let with = ("router.logit_softcap", format!("{cap:?}"));
        let because = "the scale of that noise has a gradient of its own, which no cap bounds";
        clash(problems, key, kind(), with, because);
    }
    for loss in spec.losses.iter().filter(|loss| loss.kind.needs_noise()) {
        let with = ("losses", quoted(&loss.kind));
        if selects_by_noise(router) {
            let because = "that loss is about normal noise on the logits";
            clash(problems, key, kind(), with, because);
        } else if router.noise_kind == NoiseKind::Learned && loss.kind == LossKind::ImportanceLoad {
            let because = "that loss is about noise of one scale; importance-load-logits \
                           takes a learned one";
            clash(problems, key, kind(), with, because);
        }
    }
    if !selects_by_noise(router) {
        return;
    }
    let because = "this noise moves logits that are compared, and nothing compares them";
    if router.kind.chooser() == Chooser::Table {
        let with = ("router.kind", quoted(&router.kind));
        clash(problems, key, kind(), with, because);
    }
    if router.select != Select::TopK {
        let with = ("router.select", select_word(router.select).to_string());
        clash(problems, key, kind(), with, because);
    }
    if router.select_bias {
        let with = ("router.select_bias", "true".to_string());
        clash(problems, key, kind(), with, because);
    }
    if router.groups.is_some() {
        let with = ("router.groups", "{ ... }".to_string());
        clash(problems, key, kind(), with, because);
    }
    if router.blocks.is_some() {
        let with = ("router.blocks", "{ ... }".to_string());
        clash(problems, key, kind(), with, because);
    }
    if router.always_chosen > 0 {
        let with = ("router.always_chosen", router.always_chosen.to_string());
        clash(problems, key, kind(), with, because);
    }
    if router.noise_kind == NoiseKind::GumbelSecond && spec.shape.top_k == 1 {
        let with = ("shape.top_k", "1".to_string());
        clash(problems, key, kind(), with, "the first choice has no noise");
    }
}

fn entropy(spec: &LayerSpec, problems: &mut Vec<Problem>) {
    let router = &spec.router;
    if router.entropy.is_none() {
        return;
    }
    let (key, value) = ("router.entropy", "{ ... }".to_string());
    if matches!(router.select, Select::SparseMixer(_) | Select::Sinkhorn(_)) {
        let with = ("router.select", select_word(router.select).to_string());
        let because = "defined for the logits of top-k and expert choice";
        clash(problems, key, value, with, because);
    } else if spec.scored_experts() == 1 {
        let with = ("shape.experts", "1".to_string());
        let because = "a choice of one has no entropy";
        clash(problems, key, value, with, because);
    }
}

fn expert_choice(spec: &LayerSpec, problems: &mut Vec<Problem>) {
    let (router, experts) = (&spec.router, spec.shape.experts);
    let select = || select_word(router.select).to_string();
    if spec.shape.top_k != experts {
        let message = format!(
            "`router.select` = {} needs `shape.top_k` = {experts}, the number of experts",
            select()
        );
        let problem = Problem::new("router.select", message)
            .label("a token may be taken by every expert")
            .with("shape.top_k", format!("{} here", spec.shape.top_k));
        problems.push(problem.help(format!("set `top_k` to {experts}")));
    }
    let select = ("router.select", select());
    let others = [
        ("router.select_bias", router.select_bias),
        ("router.active_k", router.active_k),
    ];
    let because = "experts take their best tokens by score";
    for (key, _) in others.into_iter().filter(|(_, set)| *set) {
        clash(problems, key, "true".to_string(), select.clone(), because);
    }
    if router.groups.is_some() {
        let (key, value) = ("router.groups", "{ ... }".to_string());
        clash(problems, key, value, select.clone(), because);
    }
    let others = [
        ("experts.identity", spec.experts.identity),
        ("experts.zero", spec.experts.zero),
    ];
    for (key, count) in others.into_iter().filter(|(_, count)| *count > 0) {
        let because = "only experts with weights take tokens";
        clash(problems, key, count.to_string(), select.clone(), because);
    }
    if spec.capacity.mode != CapacityMode::Dropless {
        let value = quoted(&spec.capacity.mode);
        let because = "every expert takes the same number of tokens already";
        clash(problems, "capacity.mode", value, select, because);
    }
}

fn sinkhorn(router: &Router, rounds: usize, problems: &mut Vec<Problem>) {
    Range {
        key: "router.select",
        value: rounds,
        least: 1,
        most: MAX_SINKHORN_ROUNDS,
        because: "the most rounds that are launched",
    }
    .check(problems);
    let select = ("router.select", select_word(router.select).to_string());
    let because = "the iteration balances the logits themselves";
    if router.select_bias {
        let key = "router.select_bias";
        clash(problems, key, "true".to_string(), select.clone(), because);
    }
    if router.groups.is_some() {
        let key = "router.groups";
        clash(problems, key, "{ ... }".to_string(), select, because);
    }
}
