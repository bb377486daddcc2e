//! The ports of a rank's parts: tensors that other ranks or another part write or read. They are
//! plain scratch in the plan of one process, so each part gives them their roles here.

use crate::TensorPlan;
use crate::layer::TensorRole;

/// A tensor at the boundary of a part.
struct Port {
    /// The name of the tensor; in the shared-expert part, the name behind the expert's index.
    name: &'static str,
    /// Its role in that part.
    role: TensorRole,
}

const fn port(name: &'static str, role: TensorRole) -> Port {
    Port { name, role }
}

/// The ports of the expert part: rows and their layout come in, results and gradients go out.
const EXPERTS: [Port; 9] = [
    port("rows", TensorRole::Input),
    port("offsets", TensorRole::Input),
    port("row_tiles", TensorRole::Input),
    port("row_slots", TensorRole::Input),
    port("topk_weights", TensorRole::Input),
    port("out", TensorRole::Output),
    port("dout", TensorRole::OutputGradient),
    port("drows", TensorRole::InputGradient),
    port("dweight_parts", TensorRole::InputGradient),
];

/// The ports of each shared expert.
const SHARED: [Port; 4] = [
    port("out", TensorRole::Output),
    port("weight", TensorRole::OutputGradient),
    port("drows", TensorRole::InputGradient),
    port("dweight_parts", TensorRole::InputGradient),
];

/// The ports of the dispatch part. Ranks fill the counts of all tokens by an exchange, where one
/// process takes them from its caller. Every backward pass receives the gradients anew, so forward
/// need not keep them.
const TOKENS: [Port; 4] = [
    port("global_counts", TensorRole::Scratch),
    port("global_tokens", TensorRole::Scratch),
    port("drows", TensorRole::OutputGradient),
    port("dweight_parts", TensorRole::OutputGradient),
];

/// Returns the gradients that come back from experts in a backward pass.
pub(super) fn brought_back() -> impl Iterator<Item = &'static str> {
    let gradients = TOKENS
        .iter()
        .filter(|port| port.role == TensorRole::OutputGradient);
    gradients.map(|port| port.name)
}

/// Sets the roles of the expert part's ports.
pub(super) fn of_experts(tensors: &mut [TensorPlan]) {
    set(tensors, &EXPERTS, |name| Some(name));
}

/// Sets the roles of the shared-expert part's ports.
pub(super) fn of_shared(tensors: &mut [TensorPlan]) {
    set(tensors, &SHARED, shared_part);
}

/// Sets the roles of the dispatch part's ports. With `shared`, gradients come back from sharded
/// shared experts, too.
pub(super) fn of_tokens(tensors: &mut [TensorPlan], shared: bool) {
    set(tensors, &TOKENS, |name| {
        shared_part(name).filter(|_| shared).or(Some(name))
    });
}

/// Sets the role of each tensor whose `name` is that of a port.
fn set(tensors: &mut [TensorPlan], ports: &[Port], name: impl Fn(&str) -> Option<&str>) {
    for tensor in tensors {
        let port = name(&tensor.name).and_then(|name| ports.iter().find(|port| port.name == name));
        if let Some(port) = port {
            tensor.role = port.role;
        }
    }
}

/// Returns the part of a tensor's name behind the index of its shared expert: `up.weight` of
/// `shared.0.up.weight`.
pub(super) fn shared_part(name: &str) -> Option<&str> {
    let (number, part) = name.strip_prefix("shared.")?.split_once('.')?;
    number.parse::<usize>().is_ok().then_some(part)
}
