//! Many migrations at once through two services, between made QEMUs.

#[path = "host/rig.rs"]
mod rig;

use rig::{figures, finish_under_way, status_of, under_way, until, Rig, A, B};

/// The first of B's ports here.
const FIRST: u16 = 49_200;

/// Migrations at a time, and rounds until the figures are taken: the services then keep as many
/// records as they ever do. `make proof` has more of both.
fn choice() -> (u16, usize) {
    if std::env::var_os("PLATEN_PROOF").is_some() {
        (20, 5)
    } else {
        (4, 1)
    }
}

/// Rounds until two of them cost nothing. Threads that overlap as never before take memory of their
/// own from the allocator, once; a leak costs memory in every round.
const MOST: usize = 8;

#[test]
fn many_guests_at_once_leave_the_services_as_they_were() {
    let (count, warm) = choice();
    let rig = Rig::new("");
    for host in [A, B] {
        let ports = format!("\"{FIRST}-{}\"", FIRST + count - 1);
        rig.configure(host, |text| text.replace("\"49152-49155\"", &ports));
    }
    let services = [A, B].map(|host| {
        let mut service = rig.spawn(host, &[]);
        service.says("for other hosts");
        service
    });
    let mut past: Vec<[_; 2]> = Vec::new();
    for round in 1..=warm + MOST {
        let ends: Vec<_> = (0..count).map(|nth| under_way(&rig, FIRST + nth)).collect();
        for host in [A, B] {
            // A destination says five times a second how far it is.
            until(|| {
                let running = rig.list(host)["running"].as_array().unwrap().clone();
                assert_eq!(running.len(), usize::from(count), "{running:?}");
                running.iter().any(|record| record["phase"] == "active")
            });
        }
        std::thread::scope(|scope| {
            ends.into_iter().for_each(|ends| drop(scope.spawn(|| finish_under_way(ends))));
        });
        // The last threads and descriptors go with the last carriers.
        until(|| rig.carriers_are_gone());
        for host in [A, B] {
            let all = (round * usize::from(count)).min(100);
            rig.ended(host, all);
            let status = rig.status(host);
            assert_eq!((status_of(&status, "completed"), status_of(&status, "failed")), (all, 0));
        }
        let mut most = 0;
        if let Some(before) = (round >= warm + 2).then(|| past[round - 3]) {
            for (service, (fds, threads, memory)) in services.iter().zip(before) {
                let now = || figures(service.id());
                // A question about the status may just be ending, now as well as before.
                until(|| now().0 <= fds && now().1 <= threads);
                let grown = now().2.saturating_sub(memory);
                println!("{count} at once: {fds} files, {threads} threads, {memory} KiB, +{grown}");
                most = most.max(grown);
            }
            if most < 1024 {
                return;
            }
        }
        past.push(services.each_ref().map(|service| figures(service.id())));
    }
    panic!("any two rounds cost 1024 KiB or more");
}
