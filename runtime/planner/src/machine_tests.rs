use super::*;

#[test]
fn every_machine_that_ships_reads() {
    for name in published_names() {
        let machine = published(name).unwrap();
        assert_eq!(machine.name, name);
        assert!(machine.levels.iter().all(|level| !level.source.is_empty()));
    }
}

#[test]
fn what_is_wrong_is_named() {
    let error = published("h100ib").unwrap_err().to_string();
    assert!(error.contains("did you mean `h100-ib`?"), "{error}");
    let text = include_str!("../machines/h800.toml");
    let read = |from: &str, to: &str| Machine::from_toml(&text.replacen(from, to, 1));
    let error = read("alpha_us", "alhpa_us").unwrap_err().to_string();
    assert!(error.contains("did you mean `alpha_us`?"), "{error}");
    let error = read("radix = 8", "radix = 0").unwrap_err().to_string();
    assert!(error.contains("nvlink.radix = 0; only the last"), "{error}");
    let error = read("alpha_us", "hidden = 1.5\nalpha_us").unwrap_err();
    assert!(
        error.to_string().contains("nvlink.hidden = 1.5; a part"),
        "{error}"
    );
    let error = read("memory_gbs = ", "memory_gbs = -")
        .unwrap_err()
        .to_string();
    assert!(error.contains("must be above 0"), "{error}");
}

#[test]
fn links_have_half_of_their_rate_where_they_say_so() {
    let level = Level {
        name: "link".to_string(),
        radix: 0,
        alpha_us: 0.0,
        bandwidth_gbs: 40.0,
        half_size_kib: 4.0,
        half_peers: 3.0,
        fanout: Fanout {
            free: 10.0,
            per_peer: 0.1,
        },
        hidden: 0.0,
        factors: Vec::new(),
        shared: 2,
        source: String::new(),
    };
    assert_eq!(level.rate(3.0), 10e9);
    let many = level.rate(20.0);
    assert!((many - 20e9 * 20.0 / 23.0 / 2.0).abs() < 1.0, "{many}");
    assert!((level.per_message() * 20e9 - 4096.0).abs() < 1e-6);
}

#[test]
fn factors_are_met_and_interpolated() {
    let of = |peers, kib, by| Factor {
        peers,
        kib,
        by,
        again: None,
    };
    let all = [
        of(4.0, 64.0, 1.0),
        of(1.0, 1.0, 1.0),
        of(1.0, 16.0, 4.0),
        of(4.0, 1.0, 9.0),
    ];
    let near = |peers, kib, by: f64| {
        let found = factor(&all, peers, kib);
        assert!((found / by - 1.0).abs() < 1e-9, "{peers} {kib}: {found}");
    };
    for Factor { peers, kib, by, .. } in all {
        near(peers, kib, by);
    }
    near(1.0, 4.0, 2.0);
    near(4.0, 8.0, 3.0);
    near(2.0, 1.0, 3.0);
    // Beyond the measured range.
    near(0.5, 0.1, 1.0);
    near(64.0, 1e6, 1.0);
    assert_eq!(factor(&[], 3.0, 1.0), 1.0);
}
