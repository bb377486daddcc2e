//! The table of collective operations.

use crate::PlanPart;
use serde::{Deserialize, Serialize};

/// A collective operation of a rank's pass. Its row in [`OPS`] says everything else about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CollectiveOp {
    /// Every rank learns how many tokens each rank has, before anything else. The capacity of all
    /// ranks is that of the rank with the most tokens, and the number of a rank's first token is
    /// the sum of the counts before it.
    TokenCounts,
    /// Every rank of a group learns how many rows each rank has for every expert. The choice of
    /// shadowed experts follows from these counts.
    TokensPerExpert,
    /// Every rank of a group learns how many rows it gets for each of its experts from each rank;
    /// `offsets` and `row_tiles` of the expert part follow from these counts.
    RowCounts,
    /// Rows, by expert, go to the ranks of their experts, to every shard of an expert; there they
    /// lie by expert, then by rank.
    Dispatch,
    /// Rows go back to the ranks they came from.
    Combine,
    /// Rows of shadowed experts stay on this rank: they are copied to the shadow part.
    KeepShadowRows,
    /// Rows of the shadow part are copied back to the dispatch part.
    ReturnShadowRows,
    /// A weight of each shadowed expert goes from its owner to all groups.
    BroadcastShadowWeight,
    /// Gradients of a shadowed weight are summed over the groups; the owner gets the sum.
    ReduceShadowGradient,
    /// Rows of the expert part are summed over the shards of the experts; each shard has the sum
    /// afterwards.
    AllReduceTp,
    /// TP peers, which hold shards of the same experts, learn how many tokens each has.
    TpTokenCounts,
    /// Rows of this rank's tokens go to all TP peers, where they lie by rank, then by token.
    AllGatherTp,
    /// A tensor of the shared-expert part is summed over the shards; each rank gets the rows of its
    /// own tokens.
    ReduceScatterTp,
    /// A weight of shared experts that the first shard holds goes to all shards.
    BroadcastTp,
    /// A tensor is summed over all ranks.
    AllReduceSum,
    /// The tokens of all ranks that have at least one expert are counted, from `topk_ids`.
    CountLiveTokens,
    /// Every rank gets the maximum over all ranks.
    AllReduceMax,
    /// The slots of this rank's tokens are placed as routing the tokens of all ranks together
    /// decided, where a call needs that. Every rank gathered the router's inputs before the pass.
    GlobalRouting,
    /// The loss terms of each tile of this rank's tokens, a row for each tile, are summed over all
    /// tiles of all ranks. The sum goes to the first tile; the other tiles get zeros.
    ReduceLossParts,
    /// The ranks of a block gather the parts of a weight that each owns: an all-gather into the
    /// weight of the expert part.
    AllGatherWeight,
    /// Gradients of a weight of the expert part are summed over the ranks of a block; each rank
    /// gets the part that it owns.
    ReduceScatterGradient,
    /// Weights of the experts of each group, as its first shard holds them, go to all ranks.
    AllGatherExperts,
}

/// The process group of an operation: the ranks that run it together at the adaptive parallelism
/// degree of a call. Those that do not depend on a degree, and have a name for users, are
/// `ProcessGroup` of the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpGroup {
    /// The rank itself.
    Own,
    /// All ranks of the job.
    World,
    /// The ranks that exchange rows, at the adaptive parallelism degree of a call.
    Ep,
    /// The ranks among these that multiply the same rows with shards of the same experts.
    ExpertTp,
    /// The ranks that gather each other's weights, at the degree of a call.
    GatherGroup,
    /// The ranks with shards of the same shared experts.
    SharedTp,
}

/// The pattern of an operation's messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collective {
    /// No messages.
    Local,
    /// Each rank sends the same bytes to every rank.
    AllGather,
    /// Each rank sends every rank its own bytes.
    AllToAll,
    /// One rank sends to every rank: the owner of a shadowed expert, or the first of the shards
    /// that hold the same experts.
    Broadcast,
    /// Ranks get one result of the bytes of all of them.
    AllReduce,
    /// The owner gets a sum.
    Reduce,
    /// Each rank gets its own part of a sum.
    ReduceScatter,
}

/// The amount of data that an operation moves. Its unit decides how the amount follows from a
/// call's tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Amount {
    /// Nothing.
    Nothing,
    /// One 64-bit number.
    Number,
    /// A 64-bit number for each expert of the layer.
    NumberPerExpert,
    /// A 64-bit number for each expert of the rank that gets them.
    NumberPerOwnExpert,
    /// The rows of a tensor that go to experts, or come from them.
    ExpertRows,
    /// The rows of a tensor for shadowed experts.
    ShadowRows,
    /// The parts of a tensor that belong to shadowed experts.
    ShadowTensor,
    /// The rows of a tensor, one for each token of the rank.
    TokenRows,
    /// One row of a tensor.
    OneRow,
    /// A whole tensor.
    Tensor,
    /// The part of a tensor of experts that a rank owns.
    Region,
}

/// The bytes of one number that ranks exchange.
pub const NUMBER_BYTES: u64 = 8;

/// One row of [`OPS`].
#[derive(Clone, Copy, Debug)]
pub struct OpRow {
    /// The operation.
    pub op: CollectiveOp,
    /// The pattern of its messages.
    pub collective: Collective,
    /// The ranks that run it together.
    pub group: OpGroup,
    /// The part of the tensor that it reads; `None` where it moves counts that no kernel reads.
    pub from: Option<PlanPart>,
    /// The part of the tensor that it writes.
    pub to: Option<PlanPart>,
    /// The amount of data.
    pub amount: Amount,
    /// Its text, with the fields of [`OpText`] in braces.
    text: &'static str,
}

/// The values in the text of an operation.
#[derive(Clone, Debug)]
pub struct OpText<'a> {
    /// The name of the tensor that it reads.
    pub from: &'a str,
    /// The name of the tensor that it writes.
    pub to: &'a str,
    /// The bytes of one unit of its [`Amount`].
    pub bytes: u64,
    /// The number of ranks of its process group.
    pub ranks: usize,
    /// The number of shards that each row goes to.
    pub shards: usize,
}

use Amount::*;
use Collective::*;
use OpGroup::*;
use PlanPart::{Dispatch as Tokens, Experts, Shadows, Shared};

/// Makes a row; the parts of its tensors are given as `[from, to]`.
const fn row(
    op: CollectiveOp,
    (collective, group): (Collective, OpGroup),
    parts: Option<[PlanPart; 2]>,
    amount: Amount,
    text: &'static str,
) -> OpRow {
    let (from, to) = match parts {
        Some([from, to]) => (Some(from), Some(to)),
        None => (None, None),
    };
    OpRow {
        op,
        collective,
        group,
        from,
        to,
        amount,
        text,
    }
}

/// The collective operations, in the order of [`CollectiveOp`].
pub const OPS: [OpRow; 22] = [
    row(
        CollectiveOp::TokenCounts,
        (AllGather, World),
        None,
        Number,
        "token counts of all ranks: {bytes} bytes",
    ),
    row(
        CollectiveOp::TokensPerExpert,
        (AllGather, Ep),
        None,
        NumberPerExpert,
        "tokens per expert of all ranks, which choose shadows: {bytes} bytes from each",
    ),
    row(
        CollectiveOp::RowCounts,
        (AllToAll, Ep),
        None,
        NumberPerOwnExpert,
        "row counts to the experts' ranks: {bytes} bytes from each",
    ),
    row(
        CollectiveOp::Dispatch,
        (AllToAll, Ep),
        Some([Tokens, Experts]),
        ExpertRows,
        "{from} to {to} of experts: {bytes} bytes a row{shards}",
    ),
    row(
        CollectiveOp::Combine,
        (AllToAll, Ep),
        Some([Experts, Tokens]),
        ExpertRows,
        "{from} of experts to {to}: {bytes} bytes a row",
    ),
    row(
        CollectiveOp::KeepShadowRows,
        (Local, Own),
        Some([Tokens, Shadows]),
        ShadowRows,
        "{from} that stay to {to} of shadows: {bytes} bytes a row",
    ),
    row(
        CollectiveOp::ReturnShadowRows,
        (Local, Own),
        Some([Shadows, Tokens]),
        ShadowRows,
        "{from} of shadows to {to}: {bytes} bytes a row",
    ),
    row(
        CollectiveOp::BroadcastShadowWeight,
        (Broadcast, Ep),
        Some([Experts, Shadows]),
        ShadowTensor,
        "{from} of experts with shadows to all: at most {bytes} bytes",
    ),
    row(
        CollectiveOp::ReduceShadowGradient,
        (Reduce, Ep),
        Some([Shadows, Experts]),
        ShadowTensor,
        "{from} of shadows summed to {to} of their owners: at most {bytes} bytes",
    ),
    row(
        CollectiveOp::AllReduceTp,
        (AllReduce, ExpertTp),
        Some([Experts, Experts]),
        ExpertRows,
        "{from} of experts summed over {ranks} shards: {bytes} bytes a row",
    ),
    row(
        CollectiveOp::TpTokenCounts,
        (AllGather, SharedTp),
        None,
        Number,
        "token counts of TP peers: {bytes} bytes",
    ),
    row(
        CollectiveOp::AllGatherTp,
        (AllGather, SharedTp),
        Some([Tokens, Shared]),
        TokenRows,
        "{from} to {to} of shared experts: {bytes} bytes a row{shards}",
    ),
    row(
        CollectiveOp::ReduceScatterTp,
        (ReduceScatter, SharedTp),
        Some([Shared, Tokens]),
        TokenRows,
        "{from} summed over {ranks} shards to {to}: {bytes} bytes a row",
    ),
    row(
        CollectiveOp::BroadcastTp,
        (Broadcast, SharedTp),
        Some([Shared, Tokens]),
        Tensor,
        "{from} of the first shard to {to} of all: {bytes} bytes",
    ),
    row(
        CollectiveOp::AllReduceSum,
        (AllReduce, World),
        Some([Tokens, Tokens]),
        Tensor,
        "{from} of all ranks summed to {to}: {bytes} bytes",
    ),
    row(
        CollectiveOp::CountLiveTokens,
        (AllGather, World),
        Some([Tokens, Tokens]),
        Number,
        "tokens of all ranks with an expert, counted in {from}: {bytes} bytes",
    ),
    row(
        CollectiveOp::AllReduceMax,
        (AllReduce, World),
        Some([Tokens, Tokens]),
        Tensor,
        "maximum of {from} over all ranks: {bytes} bytes",
    ),
    row(
        CollectiveOp::GlobalRouting,
        (Local, World),
        None,
        Nothing,
        "routing of all ranks' tokens together",
    ),
    row(
        CollectiveOp::ReduceLossParts,
        (AllReduce, World),
        Some([Tokens, Tokens]),
        OneRow,
        "{from} summed over tiles and ranks: {bytes} bytes",
    ),
    row(
        CollectiveOp::AllGatherWeight,
        (AllGather, GatherGroup),
        Some([Experts, Experts]),
        Region,
        "{from} of {ranks} ranks gathered: {bytes} bytes",
    ),
    row(
        CollectiveOp::ReduceScatterGradient,
        (ReduceScatter, GatherGroup),
        Some([Experts, Experts]),
        Region,
        "{from} summed over {ranks} ranks to its owners: {bytes} bytes",
    ),
    row(
        CollectiveOp::AllGatherExperts,
        (Broadcast, Ep),
        Some([Experts, Tokens]),
        Tensor,
        "{from} of all experts: {bytes} bytes",
    ),
];

impl CollectiveOp {
    /// Returns the operation's row of the table.
    pub fn row(self) -> &'static OpRow {
        &OPS[self as usize]
    }

    /// Returns whether it moves rows between the tokens' ranks and those of their experts, so that
    /// its rows may travel in chunks, and by an all-to-all algorithm.
    pub fn exchanges_rows(self) -> bool {
        let row = self.row();
        row.collective == AllToAll && row.amount == ExpertRows
    }
}

impl OpRow {
    /// Returns the text of the operation on some tensors.
    pub fn text(&self, of: &OpText<'_>) -> String {
        let shards = match of.shards {
            1 => String::new(),
            shards => format!(", to each of {shards} shards"),
        };
        let text = self.text.replace("{bytes}", &of.bytes.to_string());
        let text = text.replace("{ranks}", &of.ranks.to_string());
        let text = text.replace("{shards}", &shards);
        // Names come last, because they may have braces of their own.
        text.replace("{to}", of.to).replace("{from}", of.from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operation_has_its_own_row() {
        for (at, row) in OPS.iter().enumerate() {
            assert_eq!(row.op as usize, at, "{:?}", row.op);
            assert_eq!(row.op.row().op, row.op);
        }
        assert_eq!(CollectiveOp::AllGatherExperts as usize + 1, OPS.len());
    }

    #[test]
    fn rows_of_the_table_are_consistent() {
        for row in &OPS {
            let moves = !matches!(row.amount, Number | NumberPerExpert | NumberPerOwnExpert);
            let counts = !moves || row.amount == Nothing;
            assert!(counts || row.from.is_some(), "{:?}", row.op);
            assert_eq!(row.from.is_some(), row.to.is_some(), "{:?}", row.op);
            let sends = row.collective != Local;
            assert!(
                sends || matches!(row.amount, Nothing | ShadowRows),
                "{:?}",
                row.op
            );
            assert_eq!(
                row.text.contains("{bytes}"),
                row.amount != Nothing,
                "{:?}",
                row.op
            );
        }
    }

    #[test]
    fn text_has_names_and_numbers() {
        let of = OpText {
            from: "rows",
            to: "x{bytes}",
            bytes: 32,
            ranks: 2,
            shards: 2,
        };
        let text = |op: CollectiveOp| op.row().text(&of);
        assert_eq!(
            text(CollectiveOp::Dispatch),
            "rows to x{bytes} of experts: 32 bytes a row, to each of 2 shards"
        );
        assert_eq!(
            text(CollectiveOp::AllReduceTp),
            "rows of experts summed over 2 shards: 32 bytes a row"
        );
    }
}
