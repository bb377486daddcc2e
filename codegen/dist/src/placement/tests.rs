//! Placements, packings, shadows and moves: published examples, and properties of random ones.

use super::*;
use moesaic_spec::LayerSpec;
use moesaic_spec::testing::SampleRng;

fn placed(text: &str) -> Placement {
    text.parse().unwrap_or_else(|e| panic!("{text}: {e}"))
}

/// Random experts on random groups, some replicated.
fn random(draw: &mut SampleRng) -> Placement {
    let groups = draw.between(1, 6);
    let experts = draw.between(groups, 17);
    let mut lists = vec![Vec::new(); groups];
    for expert in 0..experts {
        let first = if expert < groups {
            expert // none is empty
        } else {
            draw.between(0, groups - 1)
        };
        let more = draw.between(0, 2);
        let mut on = vec![first];
        on.extend((0..more).map(|_| draw.between(0, groups - 1)));
        on.sort_unstable();
        on.dedup();
        for group in on {
            let at = draw.between(0, lists[group].len());
            lists[group].insert(at, expert);
        }
    }
    let all = holders(experts, &lists).unwrap();
    let owner = |groups: &Vec<usize>| groups[draw.between(0, groups.len() - 1)];
    let owners = all.iter().map(owner).collect();
    let split = [Split::Even, Split::Near][draw.between(0, 1)];
    Placement::new(experts, lists, Some(owners), split).unwrap()
}

/// Loads that fall as a power of the rank, in some order.
fn zipf(draw: &mut SampleRng, experts: usize, exponent: f64) -> Vec<f64> {
    let mut loads: Vec<f64> = (0..experts)
        .map(|at| (1e4 / (1.0 + at as f64).powf(exponent)).round())
        .collect();
    for at in (1..experts).rev() {
        loads.swap(at, draw.between(0, at));
    }
    loads
}

#[test]
fn the_contiguous_one_is_what_meshes_have() {
    for (groups, experts) in [(1, 1), (3, 7), (4, 4), (5, 33)] {
        let mesh = Parallel {
            ep: groups,
            ..Parallel::default()
        };
        let own = Placement::contiguous(groups, experts);
        let lists: Vec<Vec<usize>> = (0..groups)
            .map(|at| mesh.experts(at, experts).collect())
            .collect();
        let listed = Placement::new(experts, lists.clone(), None, Split::Near).unwrap();
        assert_eq!(listed, own, "one form for the same");
        for (group, list) in lists.iter().enumerate() {
            assert_eq!(&*own.of(group), list);
            for (slot, &expert) in list.iter().enumerate() {
                assert_eq!(own.owner(expert), group);
                assert_eq!(own.slot(group, expert), Some(slot));
            }
        }
        own.check(&mesh, experts).unwrap();
        own.check(&mesh, experts + 1).unwrap_err();
    }
    let uneven = placed("0 | 1,2");
    assert!(!uneven.is_contiguous() && placed("0,1 | 2").is_contiguous());
}

#[test]
fn what_is_wrong_is_named() {
    let new = |experts, groups: &[&[usize]], owners: Option<&[usize]>| {
        let groups = groups.iter().map(|list| list.to_vec()).collect();
        let owners = owners.map(<[usize]>::to_vec);
        Placement::new(experts, groups, owners, Split::Even).unwrap_err()
    };
    let nowhere = new(3, &[&[0], &[2]], None);
    assert_eq!(
        nowhere,
        PlacementError::Nowhere {
            expert: 1,
            experts: 3
        }
    );
    assert_eq!(
        new(1, &[&[0], &[]], None),
        PlacementError::EmptyGroup { group: 1 }
    );
    let unknown = new(1, &[&[0, 1]], None);
    assert!(matches!(unknown, PlacementError::Unknown { expert: 1, .. }));
    let twice = new(2, &[&[0], &[1, 0, 1]], None);
    assert_eq!(
        twice,
        PlacementError::Twice {
            expert: 1,
            group: 1
        }
    );
    let not_there = new(2, &[&[0], &[1, 0]], Some(&[0, 0]));
    assert!(not_there.to_string().contains("[1] do"), "{not_there}");
    let owners = new(2, &[&[0, 1]], Some(&[0]));
    assert!(matches!(owners, PlacementError::Owners { owners: 1, .. }));
}

#[test]
fn text_and_data_read_back() {
    for text in [
        "0-2 | 3-5,+2",
        "near: 1,0,+3 | 3,2",
        "0",
        "4,2 | 0-1,3",
        "0-1,+2 | 2",
    ] {
        assert_eq!(placed(text).to_string(), text);
    }
    let lines = "# hot ones twice\n near:\n 0-2 # first node\n3-5,+2\n";
    assert_eq!(placed(lines).to_string(), "near: 0-2 | 3-5,+2");
    let draw = &mut SampleRng::new(1);
    for _ in 0..300 {
        let placement = random(draw);
        assert_eq!(placed(&placement.to_string()), placement);
        let json = serde_json::to_string(&placement).unwrap();
        let read: Placement = serde_json::from_str(&json).unwrap();
        assert_eq!(read, placement, "{json}");
    }
    for wrong in [
        "",
        "|",
        "0 | 0",
        "+0",
        "0-",
        "2-1",
        "x",
        "far: 0",
        "0 | 2",
        "0,0",
        "0-99999999999",
    ] {
        assert!(wrong.parse::<Placement>().is_err(), "`{wrong}`");
    }
    let json = r#"{"experts":2,"groups":[[0],[0]]}"#;
    serde_json::from_str::<Placement>(json).unwrap_err();
}

#[test]
fn every_row_goes_to_one_replica() {
    let draw = &mut SampleRng::new(2);
    for _ in 0..400 {
        let placement = random(draw);
        let (groups, expert_tp) = (placement.groups(), draw.between(1, 3));
        let source = draw.between(0, groups * expert_tp - 1);
        let from = RowSource {
            rank: source,
            ep: source / expert_tp,
        };
        for expert in 0..placement.experts() {
            let rows = [0, 1, 2, 33][draw.between(0, 3)];
            let mut taken = vec![0; rows];
            let mut sizes = Vec::new();
            for group in 0..groups {
                let share = placement.share(from, expert, rows, group);
                let here = placement.slot(group, expert).is_some();
                assert!(here || share.is_empty(), "{placement}: {expert} on {group}");
                sizes.extend(here.then_some(share.len()));
                share.for_each(|row| taken[row] += 1);
            }
            assert!(taken.iter().all(|n| *n == 1), "{placement}: {taken:?}");
            let spread = sizes.iter().max().unwrap() - sizes.iter().min().unwrap();
            assert!(placement.split() == Split::Near || spread <= 1, "{sizes:?}");
        }
    }
}

#[test]
fn rows_of_replicas_stay_near_or_are_equal() {
    let even = placed("0,+2 | 2,1");
    let counts = vec![vec![1, 1, 5], vec![2, 0, 5]];
    // Five rows split into 3 and 2, for the second rank into 2 and 3.
    assert_eq!(even.received(1, &counts), [3 + 3 + 2, 2 + 3 + 1]);
    let near = even.splitting(Split::Near);
    assert_eq!(near.received(1, &counts), [3 + 5, 5 + 1]);
    let far = placed("near: 0,+2 | 2,1 | 3");
    assert_eq!(
        far.share(RowSource { rank: 2, ep: 2 }, 2, 9, 0),
        0..9,
        "2 mod 2"
    );
    assert_eq!(
        far.share(RowSource { rank: 3, ep: 2 }, 2, 9, 1),
        0..9,
        "3 mod 2"
    );
}

/// Compares with `phy2log` of EPLB's README, for both of its layers.
#[test]
fn the_example_of_eplb_comes_out() {
    let layers: [([i32; 12], [usize; 16], f64); 2] = [
        (
            [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
            [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
            1.21,
        ),
        (
            [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
            [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
            1.24,
        ),
    ];
    let eplb = Eplb {
        replicas: 16,
        expert_groups: 4,
        nodes: 2,
        ranks: 8,
    };
    for (loads, want, imbalance) in layers {
        let loads = loads.map(f64::from);
        let packed = rebalance(&loads, &eplb).unwrap();
        assert_eq!(packed.experts, want);
        for (expert, replicas) in packed.replicas.iter().enumerate() {
            assert!(!replicas.is_empty());
            assert!(replicas.iter().all(|&at| packed.experts[at] == expert));
        }
        let placement = packed.placement(8).unwrap();
        let mean = loads.iter().sum::<f64>() / 8.0;
        let found = placement.busiest(&loads) / mean;
        assert!((found - imbalance).abs() < 0.005, "{found}");
    }
}

#[test]
fn nodes_that_do_not_divide_groups_are_one() {
    let loads = [5.0, 1.0, 1.0, 1.0, 9.0, 1.0];
    let eplb = |expert_groups, nodes| Eplb {
        replicas: 8,
        expert_groups,
        nodes,
        ranks: 4,
    };
    let global = rebalance(&loads, &eplb(3, 2)).unwrap();
    assert_eq!(global, rebalance(&loads, &eplb(1, 1)).unwrap());
    assert_ne!(global, rebalance(&loads, &eplb(2, 2)).unwrap());
    let wrong = |loads: &[f64], eplb: Eplb| rebalance(loads, &eplb).unwrap_err().to_string();
    let replicas = |replicas| Eplb {
        replicas,
        ..eplb(1, 1)
    };
    assert!(wrong(&loads, replicas(5)).contains("fewer than 6 experts"));
    assert!(wrong(&loads, replicas(9)).contains("12 would"));
    assert!(wrong(&loads, eplb(4, 1)).contains("4 equal groups"));
    assert!(wrong(&loads, eplb(3, 3)).contains("3 nodes"));
    assert!(wrong(&[1.0, f64::NAN], replicas(4)).contains("expert 1"));
}

#[test]
fn packing_is_never_worse_than_what_was_there() {
    let draw = &mut SampleRng::new(3);
    let mut better = 0;
    for _ in 0..300 {
        let nodes = draw.between(1, 3);
        let ranks = nodes * draw.between(1, 4);
        let expert_groups = draw.between(1, 4);
        let experts = expert_groups * draw.between(1, 6).max(ranks.div_ceil(expert_groups));
        let replicas = experts.next_multiple_of(ranks) + ranks * draw.between(0, 2);
        let eplb = Eplb {
            replicas,
            expert_groups,
            nodes,
            ranks,
        };
        let exponent = draw.between(0, 20) as f64 / 10.0;
        let loads = zipf(draw, experts, exponent);
        let packed = rebalance(&loads, &eplb).unwrap_or_else(|e| panic!("{eplb:?}: {e}"));
        assert_eq!(packed, rebalance(&loads, &eplb).unwrap(), "the same again");
        assert_eq!(packed.experts.len(), replicas);
        let named: usize = packed.replicas.iter().map(Vec::len).sum();
        assert_eq!(named, replicas);
        packed.placement(ranks).unwrap(); // every expert somewhere, no rank empty
        let before = Placement::contiguous(ranks, experts);
        let after = balanced(&loads, &eplb, &before).unwrap();
        assert!(after.busiest(&loads) <= before.busiest(&loads));
        better += usize::from(after.busiest(&loads) < before.busiest(&loads));
    }
    assert!(better > 150, "only {better} got better");
}

#[test]
fn the_papers_conditions_are_its_model() {
    let draw = &mut SampleRng::new(4);
    let mut worth = 0;
    for _ in 0..3000 {
        let unit = |draw: &mut SampleRng| (1 + draw.between(0, 9999)) as f64 / 1e4;
        let model = ShadowModel {
            width: (1 + draw.between(0, 4095)) as f64,
            ratio: 4.0 * unit(draw),
            weight: 2.0 * unit(draw),
            operations: 1e13 * unit(draw),
            elements: 1e10 * unit(draw),
            form: ShadowForm::Paper,
            most: usize::MAX,
        };
        let before = draw.between(0, 20_000) as f64;
        let (after, count) = ((before * unit(draw)).floor(), draw.between(1, 4));
        let [plain, with] = [model.plain(before), model.shadowed(after, count)];
        if (plain - with).abs() < 1e-9 * plain {
            continue; // as good as equal
        }
        let found = model.worth(before, after, count);
        assert_eq!(found, with < plain, "{model:?}: {before} to {after}");
        worth += usize::from(found);
    }
    assert!((300..2900).contains(&worth), "{worth}");
}

/// MXFP4 has half a byte for a weight and a byte for 32 of them, and no gradient; elements are bf16.
#[test]
fn codes_travel_as_their_bytes() {
    let spec = |experts: &str| {
        let text = format!(
            "shape = {{ model_dim = 128, hidden_dim = 96, experts = 8, top_k = 2 }}\n\
             precision = {{ weights = \"bf16\", activations = \"bf16\"{experts} }}\n"
        );
        LayerSpec::from_toml(&text).unwrap()
    };
    let numbers = ShadowModel::of(&spec(""));
    let codes = ShadowModel::of(&spec(", experts = \"mxfp4\""));
    assert_eq!(numbers.weight, 1.0);
    assert_eq!(codes.weight, 0.5 * (0.5 + 1.0 / 32.0) / 2.0);
    let sent = |model: ShadowModel| model.shadowed(0.0, 1);
    assert_eq!(sent(codes), codes.weight * sent(numbers));
}

/// Compares with the released policy worked out by hand: seconds with FastMoE's constants.
#[test]
fn the_released_policy_stops_at_the_first_that_does_not_pay() {
    let present = Placement::contiguous(4, 4);
    let model = ShadowModel::fastmoe(1024);
    // A row takes 12·2·1024²/11.5e12 s = 2.19 µs and 4·4096/6.25e9 s = 2.62 µs, a shadow
    // 4·1024²·4/6.25e9 s = 2,684 µs: as much as 558 rows.
    let row = model.plain(1.0);
    let shadow = model.shadowed(0.0, 1);
    assert!((shadow / row - 558.0).abs() < 1.0, "{}", shadow / row);
    let counts = |totals: [usize; 4]| vec![totals.to_vec(), vec![0; 4]];
    let chosen = |totals| shadows(&model, &present, 1, &counts(totals));
    assert_eq!(chosen([100, 2000, 1500, 300]), [] as [usize; 0]);
    assert_eq!(chosen([100, 2000, 1400, 300]), [1, 2]);
    assert_eq!(chosen([100, 5000, 1400, 1300]), [1]);
    // The second shadow would not pay and the third would: the search stops at the second.
    assert_eq!(chosen([0, 5000, 1400, 1399]), [1]);
    assert_eq!(chosen([7, 7, 7, 7]), [] as [usize; 0]);
    let one = ShadowModel { most: 1, ..model };
    assert_eq!(
        shadows(&one, &present, 1, &counts([100, 2000, 1400, 300])),
        [1]
    );
}

#[test]
fn shadows_shorten_the_modelled_step_or_are_not_taken() {
    let draw = &mut SampleRng::new(5);
    let mut some = 0;
    for _ in 0..200 {
        let (groups, expert_tp) = (draw.between(2, 6), draw.between(1, 2));
        let experts = groups * draw.between(1, 4);
        let present = Placement::contiguous(groups, experts);
        let loads = zipf(draw, experts, 1.5);
        let counts: Vec<Vec<usize>> = (0..groups * expert_tp)
            .map(|rank| loads.iter().map(|l| *l as usize / (1 + rank % 2)).collect())
            .collect();
        let model = ShadowModel {
            form: ShadowForm::Paper,
            ..ShadowModel::fastmoe(512)
        };
        let chosen = shadows(&model, &present, expert_tp, &counts);
        assert_eq!(chosen, shadows(&model, &present, expert_tp, &counts));
        let before = *present.received(expert_tp, &counts).iter().max().unwrap();
        if !chosen.is_empty() {
            let with = present.with_shadows(&chosen).unwrap();
            let after = *with.received(expert_tp, &counts).iter().max().unwrap();
            assert!(model.worth(before as f64, after as f64, chosen.len()));
            assert!(chosen.len() < experts);
            for &expert in &chosen {
                assert_eq!(with.holders(expert).len(), groups);
                assert_eq!(with.owner(expert), present.owner(expert));
            }
            some += 1;
        }
    }
    assert!(some > 50, "{some}");
}

#[test]
fn moves_end_with_what_was_asked_for() {
    let draw = &mut SampleRng::new(6);
    let mut tried = 0;
    while tried < 200 {
        let (from, to) = (random(draw), random(draw));
        if (from.experts(), from.groups()) != (to.experts(), to.groups()) {
            moves(&from, &to).unwrap_err();
            continue;
        }
        tried += 1;
        let plan = moves(&from, &to).unwrap();
        assert_eq!(plan.missing, []);
        let mut there: Vec<Vec<Option<usize>>> = (0..to.groups())
            .map(|at| vec![None; to.count(at)])
            .collect();
        for kept in &plan.kept {
            there[kept.group][kept.to] = Some(from.of(kept.group)[kept.from]);
        }
        for one in &plan.moves {
            assert_ne!(one.from.group, one.to.group);
            assert_eq!(from.of(one.from.group)[one.from.slot], one.expert);
            assert_eq!(
                from.slot(one.to.group, one.expert),
                None,
                "what it has stays"
            );
            there[one.to.group][one.to.slot] = Some(one.expert);
        }
        for (group, list) in there.iter().enumerate() {
            let list: Vec<usize> = list.iter().map(|e| e.unwrap()).collect();
            assert_eq!(list, *to.of(group));
        }
    }
    let same = placed("0,+2 | 2,1");
    assert_eq!(moves(&same, &same).unwrap().moves, []);
    // The second group is gone.
    let left = moves_from(&[vec![0, 2]], &placed("2,0,1"));
    let missing = ExpertSlot { group: 0, slot: 2 };
    assert_eq!((left.missing, left.kept.len()), (vec![missing], 2));
}

#[test]
fn a_balancer_waits_until_it_is_sure() {
    let eplb = Eplb {
        replicas: 6,
        expert_groups: 1,
        nodes: 1,
        ranks: 2,
    };
    let options = Balancing {
        decay: 0.5,
        gain: 0.1,
        patience: 2,
        rest: 3,
    };
    let mut balancer = Balancer::new(4, eplb, options);
    let mut present = Placement::contiguous(2, 4);
    let hot = [90, 70, 20, 20];
    let mut steps = Vec::new();
    for step in 0..40 {
        balancer.observe(&hot).unwrap();
        if let Some(next) = balancer.propose(&present).unwrap() {
            assert!(balancer.gain(&present, &next) > 0.1);
            present = next;
            balancer.moved();
            steps.push(step);
        }
    }
    // Checks three steps of rest, a move at the second proposal, and none after it.
    assert_eq!(steps, [3]);
    assert!((present.busiest(balancer.average()) - 0.5).abs() < 0.05);
    // Checks that a step without rows changes nothing and a step of another layer is refused.
    let before = balancer.average().to_vec();
    balancer.observe(&[0; 4]).unwrap();
    assert_eq!(balancer.average(), before);
    balancer.observe(&[0; 3]).unwrap_err();
    balancer.observe(&[-1, 1, 0, 0]).unwrap_err();
}

/// Checks that a slightly hot expert moves nothing, and that a load that swings does not make
/// experts swing.
#[test]
fn a_balancer_is_not_moved_by_little() {
    let eplb = Eplb {
        replicas: 4,
        expert_groups: 1,
        nodes: 1,
        ranks: 2,
    };
    let mut balancer = Balancer::new(4, eplb, Balancing::default());
    let present = Placement::contiguous(2, 4);
    for step in 0..200 {
        let swing = [[60, 50, 45, 45], [45, 45, 60, 50]][step % 2];
        balancer.observe(&swing).unwrap();
        assert_eq!(balancer.propose(&present).unwrap(), None, "step {step}");
    }
}
