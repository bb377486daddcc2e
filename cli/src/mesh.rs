//! How ranks share a layer, as an argument.

use moesaic::Parallel;

/// Reads `ep=4,shards=2`.
pub fn parse(text: &str) -> Result<Parallel, String> {
    let mut mesh = Parallel::default();
    let mut seen = Vec::new();
    for part in text.split(',') {
        let (name, number) = part.split_once('=').unwrap_or((part, ""));
        let number = number.trim().parse();
        let number = number.map_err(|_| format!("`{part}` is not NAME=NUMBER, as in ep=4"))?;
        if seen.contains(&name.trim()) {
            return Err(format!("`{}` is there twice", name.trim()));
        }
        seen.push(name.trim());
        match name.trim() {
            "ep" => mesh.ep = number,
            "shards" => mesh.shards = number,
            "dp" => mesh.dp = number,
            other => return Err(format!("`{other}` is none of ep, shards, dp")),
        }
    }
    Ok(mesh)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mesh_is_named_part_by_part() {
        let mesh = parse("ep=4,shards=2").unwrap();
        assert_eq!((mesh.ep, mesh.shards, mesh.dp), (4, 2, 1));
        for wrong in ["", "ep", "ep=x", "pp=2", "ep=-1", "ep=2,dp=2, ep=4"] {
            parse(wrong).unwrap_err();
        }
    }
}
