//! What a rank's file says of itself: which rank's it is, of how many, and what is cut how. So
//! parts come together in the order of ranks, whatever the order in which a shell lists them.

use crate::console::Console;
use crate::failure::{Failure, Result};
use moesaic::Parallel;
use moesaic::weights::Checkpoint;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Where the text is in a file's metadata.
pub const KEY: &str = "moesaic.shard";

/// More than any layer is cut for: what a file says is not believed beyond.
const MOST_RANKS: usize = 1 << 20;

/// How a layer is cut for ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cut {
    /// How many ranks have parts.
    pub ranks: usize,
    /// Ranks among them that share each expert.
    pub expert_tp: usize,
    /// Whether they share the shared experts, too.
    pub sharded: bool,
    /// Which groups of ranks have which experts, as text.
    pub placement: String,
}

/// Files in the order of ranks.
pub struct Ordered {
    pub files: Vec<PathBuf>,
    /// The first of those that were given, and the cut that all of them name.
    pub said: Option<(PathBuf, Cut)>,
}

/// A file and what it says.
type Noted<'f> = (&'f Path, Option<(usize, Cut)>);

/// The file of a rank. Names sort as ranks do.
pub fn file_name(rank: usize, ranks: usize) -> String {
    let digits = ranks.saturating_sub(1).to_string().len();
    format!("rank-{rank:0digits$}.safetensors")
}

impl Cut {
    /// That of a mesh, with the placement as text.
    pub fn new(mesh: Parallel, placement: String) -> Cut {
        Cut {
            ranks: mesh.ranks(),
            expert_tp: mesh.expert_tp,
            sharded: mesh.shards_shared(),
            placement,
        }
    }

    /// What is written into a rank's file.
    pub fn text(&self, rank: usize) -> String {
        json!({
            "rank": rank,
            "ranks": self.ranks,
            "expert_tp": self.expert_tp,
            "shared": self.shared(),
            "placement": self.placement,
        })
        .to_string()
    }

    fn shared(&self) -> &'static str {
        if self.sharded { "sharded" } else { "whole" }
    }

    /// A rank and its cut, from the text.
    fn read(text: &str) -> Option<(usize, Cut)> {
        let read: Value = serde_json::from_str(text).ok()?;
        let number = |key: &str| usize::try_from(read.get(key)?.as_u64()?).ok();
        let word = |key: &str| read.get(key)?.as_str();
        let cut = Cut {
            ranks: number("ranks")?,
            expert_tp: number("expert_tp")?,
            sharded: word("shared")? == "sharded",
            placement: word("placement")?.to_string(),
        };
        Some((number("rank")?, cut))
            .filter(|(rank, cut)| *rank < cut.ranks && cut.ranks <= MOST_RANKS)
    }

    /// Refuses a file that says another cut than this, which the command was given.
    pub fn check(&self, file: &Path, said: &Cut) -> Result {
        let parts = |cut: &Cut| {
            [
                format!("--expert-tp {}", cut.expert_tp),
                format!("--shared {}", cut.shared()),
                format!("a --placement that says `{}`", cut.placement),
            ]
        };
        let mut both = parts(said).into_iter().zip(parts(self));
        if let Some((theirs, ours)) = both.find(|(theirs, ours)| theirs != ours) {
            let message = format!("{} was cut with {theirs}, not {ours}", file.display());
            return Err(Failure::input(message).hint(format!("say {theirs}")));
        }
        Ok(())
    }
}

/// The files in the order of ranks, with the cut that they name; as they are given where none
/// of them says whose it is, as those of older versions and of other programs.
pub fn in_order(files: &[PathBuf], console: &Console) -> Result<Ordered> {
    let noted = files.iter().map(|file| noted(file));
    let noted: Vec<Noted<'_>> = noted.collect::<Result<_>>()?;
    let with = noted
        .iter()
        .find_map(|(file, said)| Some((*file, said.as_ref()?)));
    let Some((first, (_, cut))) = with else {
        console.note("the files do not say which rank's they are: they are taken in this order");
        return Ok(Ordered {
            files: files.to_vec(),
            said: None,
        });
    };
    let mut ranks: Vec<Option<&Path>> = vec![None; cut.ranks];
    for (file, said) in &noted {
        let rank = rank_of(file, said.as_ref(), (first, cut))?;
        if let Some(other) = ranks[rank].replace(file) {
            let (file, other) = (file.display(), other.display());
            let message = format!("{other} and {file} are both of rank {rank}");
            return Err(Failure::input(message).hint("give each rank's file once"));
        }
    }
    if let Some(missing) = ranks.iter().position(Option::is_none) {
        let message = format!(
            "the part of rank {missing} is missing: there are {} ranks, and {} files",
            cut.ranks,
            files.len()
        );
        return Err(Failure::input(message).hint("give the files of all ranks"));
    }
    let ranks = ranks.into_iter().flatten().map(Path::to_path_buf);
    Ok(Ordered {
        files: ranks.collect(),
        said: Some((first.to_path_buf(), cut.clone())),
    })
}

/// Which rank's a file is, where `first` says how many there are.
fn rank_of(file: &Path, said: Option<&(usize, Cut)>, (first, cut): (&Path, &Cut)) -> Result<usize> {
    let (file, first) = (file.display(), first.display());
    let message = match said {
        Some((rank, own)) if own == cut => return Ok(*rank),
        Some((rank, own)) => format!(
            "{first} is of {} ranks, {file} is rank {rank} of {} in another cut",
            cut.ranks, own.ranks
        ),
        None => format!("{first} says which rank's it is, {file} does not"),
    };
    Err(Failure::input(message).hint("give the files of one `moesaic experts shard`"))
}

fn noted(file: &PathBuf) -> Result<Noted<'_>> {
    let checkpoint = Checkpoint::open(file)?;
    let Some(text) = checkpoint.noted(KEY) else {
        return Ok((file, None));
    };
    let said = Cut::read(text).ok_or_else(|| {
        let file = file.display();
        Failure::input(format!("{file}: its `{KEY}` names no rank: {text}"))
    })?;
    Ok((file, Some(said)))
}
