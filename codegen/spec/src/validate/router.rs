//! The router's rules about options that exclude or need each other.

use super::{Conflict, Range, Real, against_kind, clash, quoted, router_sizes};
use crate::{
    BiasedValues, CapacityMode, Chooser, GroupStat, Groups, LayerSpec, MAX_BLOCK_TOKENS,
    MAX_MATRIX, MAX_TABLE_ROWS, Problem, Renormalize, Router, RouterInput, Score, Select,
    TokenBlocks,
};

pub(super) fn check(spec: &LayerSpec, problems: &mut Vec<Problem>) {
    numbers(&spec.router, problems);
    router_sizes::check(&spec.router, problems);
    table_area(spec, problems);
    bias(&spec.router, problems);
    match spec.router.kind.chooser() {
        Chooser::Caller => external(&spec.router, problems),
        Chooser::Table => looked_up(spec, problems),
        Chooser::Scores => selection(spec, problems),
    }
    random_second(spec, problems);
    renormalization(&spec.router, problems);
}

fn numbers(router: &Router, problems: &mut Vec<Problem>) {
    Real::Positive.check("router.scale", router.scale, problems);
    Real::Positive.check("router.norm_order", router.norm_order, problems);
    Real::NotNegative.check("router.renormalize_eps", router.renormalize_eps, problems);
    Real::Fraction.check("router.jitter", router.jitter, problems);
    Real::Fraction.check("router.input_dropout", router.input_dropout, problems);
    Real::NotNegative.check("router.noise", router.noise, problems);
    if let Some(cap) = router.logit_softcap {
        Real::Positive.check("router.logit_softcap", cap, problems);
    }
    if let Select::SparseMixer(epsilon) = router.select {
        Real::NotNegative.check("router.select", epsilon, problems);
    }
}

/// Checks the product of a table's sizes.
fn table_area(spec: &LayerSpec, problems: &mut Vec<Problem>) {
    let (rows, k) = (spec.router.table_rows.unwrap_or(0), spec.shape.top_k);
    let has_table = spec.router.kind.chooser() == Chooser::Table;
    // A table with too many rows has a problem already; do not report its product too.
    if has_table && rows <= MAX_TABLE_ROWS && rows.saturating_mul(k) > MAX_MATRIX {
        let message = format!("a table of {rows} x {k} expert ids is too large");
        let help = format!(
            "offsets in the table are 32-bit: keep rows times `top_k` at {MAX_MATRIX} or below"
        );
        let problem = Problem::new("router.table_rows", message).label("rows");
        problems.push(problem.with("shape.top_k", "ids per row").help(help));
    }
}

/// Refuses a bias on logits where the product before them has one.
fn bias(router: &Router, problems: &mut Vec<Problem>) {
    let logits = router.kind.def().logits;
    if router.bias && logits.is_some_and(|logits| logits.own_bias) {
        let because = "the projection has its own bias";
        problems.push(against_kind(router, "router.bias", "true", because));
    }
}

/// Returns the options that act on the token or on the logits.
fn logit_options(router: &Router) -> Vec<(&'static str, String)> {
    let mut set = Vec::new();
    if router.bias {
        set.push(("router.bias", "true".to_string()));
    }
    if router.input != RouterInput::Token {
        set.push(("router.input", quoted(&router.input)));
    }
    if let Some(cap) = router.logit_softcap {
        set.push(("router.logit_softcap", format!("{cap:?}")));
    }
    if router.jitter != 0.0 {
        set.push(("router.jitter", format!("{:?}", router.jitter)));
    }
    if router.input_dropout != 0.0 {
        set.push((
            "router.input_dropout",
            format!("{:?}", router.input_dropout),
        ));
    }
    if router.entropy.is_some() {
        set.push(("router.entropy", "{ ... }".to_string()));
    }
    if router.noise != 0.0 {
        set.push(("router.noise", format!("{:?}", router.noise)));
    }
    set
}

/// Returns the options that select experts.
fn selection_options(router: &Router) -> Vec<(&'static str, String)> {
    let mut set = Vec::new();
    if router.select != Select::TopK {
        set.push(("router.select", "{ ... }".to_string()));
    }
    if router.random_second {
        set.push(("router.random_second", "true".to_string()));
    }
    if router.select_bias {
        set.push(("router.select_bias", "true".to_string()));
    }
    if router.select_bias_on != BiasedValues::Scores {
        set.push(("router.select_bias_on", quoted(&router.select_bias_on)));
    }
    if router.groups.is_some() {
        set.push(("router.groups", "{ ... }".to_string()));
    }
    if router.blocks.is_some() {
        set.push(("router.blocks", "{ ... }".to_string()));
    }
    if router.always_chosen > 0 {
        set.push(("router.always_chosen", router.always_chosen.to_string()));
    }
    set
}

/// Returns the options that mask slots.
fn mask_options(router: &Router) -> Vec<(&'static str, String)> {
    let flags = [
        ("router.token_mask", router.token_mask),
        ("router.active_k", router.active_k),
    ];
    let set = flags.into_iter().filter(|(_, set)| *set);
    set.map(|(key, _)| (key, "true".to_string())).collect()
}

/// Returns the options that turn scores into weights.
fn weight_options(router: &Router) -> Vec<(&'static str, String)> {
    let default = Router::default();
    let mut set = Vec::new();
    if router.score != default.score {
        set.push(("router.score", quoted(&router.score)));
    }
    if router.renormalize != default.renormalize {
        set.push(("router.renormalize", quoted(&router.renormalize)));
    }
    if router.scale != default.scale {
        set.push(("router.scale", format!("{:?}", router.scale)));
    }
    if router.expert_scale {
        set.push(("router.expert_scale", "true".to_string()));
    }
    set
}

fn external(router: &Router, problems: &mut Vec<Problem>) {
    let groups = [
        (
            logit_options(router),
            "the caller decides: there are no logits",
        ),
        (selection_options(router), "the caller picks the experts"),
        (weight_options(router), "the caller passes final weights"),
        (mask_options(router), "the caller masks slots by the id -1"),
    ];
    for (options, because) in groups {
        for (key, value) in options {
            problems.push(against_kind(router, key, &value, because));
        }
    }
}

fn looked_up(spec: &LayerSpec, problems: &mut Vec<Problem>) {
    let router = &spec.router;
    for (key, value) in selection_options(router) {
        let because = "the table picks the experts";
        problems.push(against_kind(router, key, &value, because));
    }
    if spec.has_logits() {
        return;
    }
    for (key, value) in logit_options(router) {
        let name = key.trim_start_matches("router.");
        let conflict = Conflict {
            key,
            value,
            with: "router.score",
            with_value: quoted(&router.score),
            because: "a table with unit weights computes no logits",
            change: format!("remove `{name}`, or choose a score such as \"softmax\""),
        };
        problems.push(conflict.problem().with("router.kind", "table router"));
    }
}

fn selection(spec: &LayerSpec, problems: &mut Vec<Problem>) {
    let router = &spec.router;
    let on_scores = router.select_bias_on == BiasedValues::Scores;
    if !on_scores && !router.select_bias {
        let (key, value) = ("router.select_bias_on", quoted(&router.select_bias_on));
        let with = ("router.select_bias", "false".to_string());
        clash(problems, key, value, with, "there is no bias to add");
    }
    let late = matches!(router.score, Score::SoftmaxSelected | Score::One);
    if router.select_bias && on_scores && late {
        let conflict = Conflict {
            key: "router.select_bias",
            value: "true".to_string(),
            with: "router.score",
            with_value: quoted(&router.score),
            because: "added to scores before selection",
            change: "this score exists only after selection: use \"softmax\", \"sigmoid\" or \
                     \"sqrt-softplus\", set select_bias_on = \"logits\", or turn `select_bias` \
                     off"
            .to_string(),
        };
        problems.push(conflict.problem());
    }
    if let Some(groups) = &router.groups {
        check_groups(spec, groups, problems);
    }
    if let Some(blocks) = router.blocks {
        check_blocks(spec, blocks, problems);
    }
    if router.always_chosen > 0 {
        always_chosen(spec, problems);
    }
    match router.select {
        Select::SparseMixer(_) => sparse_mixer(spec, problems),
        Select::PerGroup(groups) => per_group(spec, groups, problems),
        _ => {}
    }
}

/// Checks that the tokens of a block can agree on experts.
fn check_blocks(spec: &LayerSpec, blocks: TokenBlocks, problems: &mut Vec<Problem>) {
    let router = &spec.router;
    let tokens = Range {
        key: "router.blocks.tokens",
        value: blocks.tokens,
        least: 1,
        most: MAX_BLOCK_TOKENS,
        because: "the largest block that kernels are generated for",
    };
    tokens.check(problems);
    let (k, scored) = (spec.shape.top_k, spec.scored_experts());
    if k <= scored && !(k..=scored).contains(&blocks.experts) {
        let count = blocks.experts;
        let message = format!("`router.blocks.experts` = {count} is not from {k} to {scored}");
        let problem = Problem::new("router.blocks.experts", message)
            .label("from `top_k` to all that the router scores")
            .with("shape.top_k", format!("{k} wanted"));
        problems.push(problem.help(format!("use a number from {k} to {scored}")));
    }
    let mut against = |with: &str, with_value: String, because: &str| {
        let value = "{ ... }".to_string();
        clash(
            problems,
            "router.blocks",
            value,
            (with, with_value),
            because,
        );
    };
    if router.select != Select::TopK {
        let because = "a token takes its best experts among those of its block";
        against(
            "router.select",
            select_word(router.select).to_string(),
            because,
        );
    }
    if router.groups.is_some() {
        let because = "a block's experts may be of any groups";
        against("router.groups", "{ ... }".to_string(), because);
    }
    if router.always_chosen > 0 {
        let because = "a block agrees on all experts of its tokens";
        against(
            "router.always_chosen",
            router.always_chosen.to_string(),
            because,
        );
    }
    if spec.capacity.mode != CapacityMode::Dropless {
        let because = "a capacity would decide by tokens of other blocks";
        against("capacity.mode", quoted(&spec.capacity.mode), because);
    }
}

/// Checks that the last experts can be chosen by every token.
fn always_chosen(spec: &LayerSpec, problems: &mut Vec<Problem>) {
    let (key, router) = ("router.always_chosen", &spec.router);
    let (always, k) = (router.always_chosen, spec.shape.top_k);
    if always > k {
        let message = format!("`{key}` = {always} is more than `top_k` = {k}");
        let problem = Problem::new(key, message)
            .label("these are among a token's experts")
            .with("shape.top_k", format!("{k} in all"));
        problems.push(problem.help(format!("use a number up to {k}, or raise `top_k`")));
        return;
    }
    let mut against = |with: &str, with_value: String, because: &str| {
        let value = router.always_chosen.to_string();
        clash(problems, key, value, (with, with_value), because);
    };
    if router.select != Select::TopK {
        let because = "the others are the best by score";
        against(
            "router.select",
            select_word(router.select).to_string(),
            because,
        );
    }
    if router.groups.is_some() {
        let because = "groups would leave some of them out";
        against("router.groups", "{ ... }".to_string(), because);
    }
    if router.random_second {
        let because = "the second expert may be one of them";
        against("router.random_second", "true".to_string(), because);
    }
    let behind = [
        ("experts.identity", spec.experts.identity),
        ("experts.zero", spec.experts.zero),
    ];
    for (with, count) in behind.into_iter().filter(|(_, count)| *count > 0) {
        against(
            with,
            count.to_string(),
            "the last experts must have weights",
        );
    }
    if let Some(loss) = spec.losses.first() {
        let because = "losses balance experts, and these have every token";
        against("losses", quoted(&loss.kind), because);
    }
}

/// Checks that groups of equal size give as many of a token's experts each.
fn per_group(spec: &LayerSpec, groups: usize, problems: &mut Vec<Problem>) {
    let (experts, k) = (spec.scored_experts(), spec.shape.top_k);
    let divides = |number: usize| groups > 0 && number.is_multiple_of(groups);
    let message = |what: String| format!("`router.select` = {{ per-group = {groups} }} {what}");
    if !divides(experts) {
        let message = message(format!("does not divide {experts} experts"));
        let problem = Problem::new("router.select", message)
            .label("groups must be of equal size")
            .help(format!("use {}", divisors(experts)));
        problems.push(super::experts_behind(spec, problem));
    } else if !divides(k) {
        let message = message(format!("does not divide `top_k` = {k}"));
        let problem = Problem::new("router.select", message)
            .label("each group gives as many experts")
            .with("shape.top_k", format!("{k} wanted"));
        problems.push(problem.help(format!("use {}", divisors(k))));
    }
    if spec.router.groups.is_some() {
        let (key, value) = ("router.groups", "{ ... }".to_string());
        let with = ("router.select", select_word(spec.router.select).to_string());
        clash(problems, key, value, with, "every group is kept");
    }
}

fn check_groups(spec: &LayerSpec, groups: &Groups, problems: &mut Vec<Problem>) {
    let experts = spec.scored_experts();
    let Groups { count, keep, .. } = *groups;
    if count == 0 || !experts.is_multiple_of(count) {
        let message = format!("`router.groups.count` = {count} does not divide {experts} experts");
        let problem = Problem::new("router.groups.count", message)
            .label("groups must be of equal size")
            .help(format!("use {}", divisors(experts)));
        problems.push(super::experts_behind(spec, problem));
        return;
    }
    if keep == 0 || keep > count {
        let message = format!("`router.groups.keep` = {keep} of {count} groups is out of range");
        let problem = Problem::new("router.groups.keep", message)
            .label(format!("must be 1 to {count}"))
            .with("router.groups.count", format!("{count} groups"));
        let help = format!("keep at least 1 and at most {count} groups");
        problems.push(problem.help(help).range("from 1 to `count`"));
        return;
    }
    group_size(spec, groups, experts / count, problems);
}

fn group_size(spec: &LayerSpec, groups: &Groups, size: usize, problems: &mut Vec<Problem>) {
    let (k, kept) = (spec.shape.top_k, groups.keep.saturating_mul(size));
    // If top_k exceeds all experts, that is the problem to report, not the groups.
    if kept < k && k <= spec.scored_experts() {
        let message = format!(
            "`router.groups.keep` = {} leaves {kept} experts for `top_k` = {k}",
            groups.keep
        );
        let problem = Problem::new("router.groups.keep", message)
            .label(format!("{} groups of {size}", groups.keep))
            .with("router.groups.count", format!("{} groups", groups.count))
            .with("shape.top_k", format!("{k} wanted"))
            .help(format!(
                "keep {} groups or more, or lower `top_k`",
                k.div_ceil(size.max(1))
            ));
        problems.push(super::experts_behind(spec, problem));
    }
    if groups.stat == GroupStat::Top2Sum && size < 2 {
        let message = "`router.groups.stat` = \"top2-sum\" needs groups of two experts or more";
        let problem = Problem::new("router.groups.stat", message)
            .label("sums the two best experts of a group")
            .with("router.groups.count", format!("groups of {size}"))
            .help("use stat = \"max\", or fewer groups");
        problems.push(super::experts_behind(spec, problem));
    }
}

fn divisors(number: usize) -> String {
    // The number may be absurd, so bound the search.
    let small = number.min(crate::MAX_EXPERTS);
    let list: Vec<String> = (1..=small)
        .filter(|n| number.is_multiple_of(*n))
        .map(|n| n.to_string())
        .collect();
    match list.as_slice() {
        [] => "at least one expert".to_string(),
        [one] => one.clone(),
        [first @ .., last] => format!("{} or {last}", first.join(", ")),
    }
}

fn sparse_mixer(spec: &LayerSpec, problems: &mut Vec<Problem>) {
    let router = &spec.router;
    let k = spec.shape.top_k;
    if k > 2 {
        let message = format!("`router.select` = {{ sparse-mixer }} cannot pick {k} experts");
        let problem = Problem::new("router.select", message)
            .label("defined for one or two experts per token")
            .with("shape.top_k", format!("{k} here"));
        problems.push(problem.help("set `top_k` to 1 or 2, or use select = \"top-k\""));
    }
    let mut clash = |key, value, because| {
        let conflict = Conflict {
            key,
            value,
            with: "router.select",
            with_value: "{ sparse-mixer }".to_string(),
            because,
            change: format!(
                "remove `{}`, or use select = \"top-k\"",
                key.trim_start_matches("router.")
            ),
        };
        problems.push(conflict.problem());
    };
    if router.score != Score::Softmax {
        let because = "its weights are a softmax over the logits near the best";
        clash("router.score", quoted(&router.score), because);
    }
    let because = "it picks from the logits themselves";
    if router.select_bias {
        clash("router.select_bias", "true".to_string(), because);
    }
    if router.groups.is_some() {
        clash("router.groups", "{ ... }".to_string(), because);
    }
}

/// Returns the value of `router.select` as in TOML, without its number.
pub(super) fn select_word(select: Select) -> &'static str {
    match select {
        Select::TopK => "\"top-k\"",
        Select::SparseMixer(_) => "{ sparse-mixer }",
        Select::ExpertChoice(_) => "{ expert-choice }",
        Select::Sinkhorn(_) => "{ sinkhorn }",
        Select::PerGroup(_) => "{ per-group }",
    }
}

fn random_second(spec: &LayerSpec, problems: &mut Vec<Problem>) {
    let (key, value) = ("router.random_second", "true".to_string());
    if !spec.router.random_second {
        return;
    }
    if spec.shape.top_k != 2 {
        let with = ("shape.top_k", spec.shape.top_k.to_string());
        let because = "defined for two experts per token";
        clash(problems, key, value, with, because);
    } else if spec.router.select != Select::TopK {
        let with = ("router.select", select_word(spec.router.select).to_string());
        let because = "defined for the two best experts";
        clash(problems, key, value, with, because);
    }
}

fn renormalization(router: &Router, problems: &mut Vec<Problem>) {
    let (rule, eps) = (router.renormalize, router.renormalize_eps);
    let with_value = quoted(&rule);
    if eps != 0.0 && matches!(rule, Renormalize::None | Renormalize::PNorm) {
        let conflict = Conflict {
            key: "router.renormalize_eps",
            value: format!("{eps:?}"),
            with: "router.renormalize",
            with_value: with_value.clone(),
            because: "used by \"sum\" and \"clamp\" only",
            change: "remove `renormalize_eps`, or use renormalize = \"sum\" or \"clamp\"".into(),
        };
        problems.push(conflict.problem());
    }
    if rule == Renormalize::Clamp && eps == 0.0 {
        let message = "`router.renormalize` = \"clamp\" needs `renormalize_eps` above 0";
        let problem = Problem::new("router.renormalize", message)
            .label("divides by max(sum, eps)")
            .with("router.renormalize_eps", "0 here");
        problems.push(problem.help("add renormalize_eps = 1e-9, or use renormalize = \"sum\""));
    }
    if router.norm_order != 1.0 && rule != Renormalize::PNorm {
        let conflict = Conflict {
            key: "router.norm_order",
            value: format!("{:?}", router.norm_order),
            with: "router.renormalize",
            with_value,
            because: "the p of \"p-norm\" only",
            change: "remove `norm_order`, or use renormalize = \"p-norm\"".into(),
        };
        problems.push(conflict.problem());
    }
}
