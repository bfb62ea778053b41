//! Migrations as KubeVirt makes them: libvirt's peer-to-peer over the unix sockets of its proxies.

use anyhow::{ensure, Result};
use libvirt_tests::{Lab, Proxies, Side};
use std::path::Path;

/// The folder of the proxies' sockets, in that of platen's.
const FOLDER: &str = "kubevirt";
const PARALLEL: [&str; 3] = ["--parallel", "--parallel-connections", "3"];

/// There and back through the proxies alone, then with platen in the place of the proxy's socket,
/// plain and parallel. The proxies carry on what is libvirt's.
pub(crate) fn migrates(lab: &mut Lab) -> Result<()> {
    for words in [&[][..], &PARALLEL] {
        let proxies = start(lab)?;
        let before = lab.service(lab.at).count()?;
        arrives(lab, words)?;
        ensure!(proxies.carried() > 64 << 20, "{} bytes by the proxies", proxies.carried());
        let after = lab.service(lab.at.other()).count()?;
        ensure!(after == before, "it went by platen, too");

        let proxies = start(lab)?;
        let counts = [lab.service(Side::A).count()?, lab.service(Side::B).count()?];
        let (from, to) = (lab.at, lab.at.other());
        let there = lab.host(to).name;
        // On the source's node: QEMU's connections go to platen's socket for the other node.
        proxies.lead_to(&Path::new("..").join(there).join("1"))?;
        // On the target's node: platen's socket is that of the QEMU.
        let ours = lab.doors_of(to).join(there).join("1");
        let _ = std::fs::remove_file(&ours);
        let theirs = Path::new("..").join(FOLDER).join(Proxies::destination());
        std::os::unix::fs::symlink(theirs, &ours)?;
        arrives(lab, words)?;
        std::fs::remove_file(&ours)?;
        ensure!(proxies.carried() == 0, "{} bytes by the proxies", proxies.carried());
        for side in [from, to] {
            let record = lab.service(side).ended(counts[side as usize] + 1)?;
            ensure!(record["status"] == "completed" && record["place"] == "socket:1", "{record}");
            let (plain, sent) = (record["plain"].as_u64(), record["transferred"].as_u64());
            ensure!(plain > Some(64 << 20) && plain > sent, "{record}");
        }
    }
    Ok(())
}

fn start(lab: &Lab) -> Result<Proxies> {
    let folder = |side| lab.doors_of(side).join(FOLDER);
    let (from, to) = (lab.at, lab.at.other());
    Proxies::start((lab.host(from), &folder(from)), (lab.host(to), &folder(to)))
}

/// The guest migrates to the other host, and every page is right.
fn arrives(lab: &mut Lab, words: &[&str]) -> Result<()> {
    let [libvirt, qemu] = Proxies::uris(&lab.doors().join(FOLDER));
    let words = [&["--p2p", "--migrateuri", &qemu], words].concat();
    let (well, said) = lab.begin_to("g1", lab.at, &libvirt, &words)?.ends()?;
    ensure!(well, "virsh migrate failed: {said}\n{}", lab.logs());
    lab.at = lab.at.other();
    lab.check_guest()
}
