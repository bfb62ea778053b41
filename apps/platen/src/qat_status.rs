//! `platen qat status`: the state of QAT on this host, and what is missing.

use crate::qat_args::StatusArgs;
use crate::say::show;
use qat::status::{Function, InstanceStatus, Status};
use qat::{Libraries, Qat, StartOptions};
use std::path::Path;

/// The steps to set up a host's first device, in order.
const SET_UP: [&str; 5] = [
    "VT-d in the firmware, intel_iommu=on on the kernel's command line",
    "ServicesEnabled=dc in /etc/default/qat (Fedora, RHEL: /etc/sysconfig/qat)",
    "systemctl enable --now qat: makes the virtual functions (16 a device) and binds them to vfio-pci",
    "usermod -a -G qat USER, and a memlock limit of 256 MiB or more",
    "hugepages are not needed: libusdm pins ordinary pages",
];

pub(crate) fn run(args: &StatusArgs) -> anyhow::Result<()> {
    let libraries = Libraries::load(&args.libraries.location());
    let device = match &libraries {
        Ok(found) if !args.no_start => Some(Qat::start(found, &StartOptions::default())),
        _ => None,
    };
    let device = device.as_ref().map(|device| device.as_ref().map(AsRef::as_ref));
    let status = Status::collect(Path::new("/"), libraries.as_ref(), device);
    if args.json {
        show(&(serde_json::to_string_pretty(&status)? + "\n"))
    } else {
        show(&text(&status))
    }
}

/// Formats one line for each part that exists, and two for each that is missing.
fn text(status: &Status) -> String {
    let mut lines = Vec::new();
    match (&status.libraries.usdm, &status.libraries.qat) {
        (Some(usdm), Some(qat)) => {
            lines.push(format!("libraries      {usdm}, {qat}"));
            for (function, _) in status.libraries.optional.iter().filter(|(_, there)| !there) {
                lines.push(format!("               without {function}, which newer ones have"));
            }
        }
        _ => {
            let why = status.libraries.error.as_deref().unwrap_or("not found");
            lines.push(format!("libraries      none: {why}"));
        }
    }
    lines.extend(status.host.functions.iter().map(function));
    if status.host.functions.is_empty() {
        lines.push("device         none on PCI".into());
    }
    let host = &status.host;
    let memlock = host.memlock.map_or("unlimited".into(), |limit| format!("{} KiB", limit >> 10));
    lines.push(format!(
        "host           IOMMU {}, /dev/vfio {} ({} of {} groups can be opened), memlock {memlock}, {} hugepages of 2 MiB, qatmgr {}",
        if host.iommu { "on" } else { "off" },
        if host.vfio { "can be opened" } else { "cannot be opened" },
        host.vfio_usable,
        host.vfio_groups,
        host.hugepages,
        if host.service { "runs" } else { "does not run" },
    ));
    if let Some(error) = &status.start_error {
        lines.push(format!("start          failed: {error}"));
    }
    for one in &status.instances {
        instance(one, &mut lines);
    }
    lines.extend(
        status.unfit.iter().map(|unfit| {
            format!("instance       {}: not usable, lacks {}", unfit.name, unfit.lacks)
        }),
    );
    for (device, counters) in &host.telemetry {
        let counters: Vec<String> =
            counters.iter().map(|(name, value)| format!("{name} {value}")).collect();
        lines.push(format!("telemetry      {device}: {}", counters.join(", ")));
    }
    if !status.missing.is_empty() {
        lines.push("missing, most basic first:".into());
        for missing in &status.missing {
            lines.push(format!("  {}", missing.what));
            lines.push(format!("      {}", missing.remedy));
        }
    }
    if host.functions.is_empty() && status.instances.is_empty() {
        lines.push("once there is a device:".into());
        lines.extend(SET_UP.iter().map(|step| format!("  {step}")));
    }
    lines.push(String::new());
    lines.join("\n")
}

fn function(function: &Function) -> String {
    let mut parts = vec![function.part.to_owned()];
    parts.push(if function.is_virtual { "virtual".into() } else { "physical".into() });
    parts
        .push(function.driver.as_ref().map_or("no driver".into(), |name| format!("driver {name}")));
    if let (Some(now), Some(most)) = (function.virtual_functions, function.virtual_functions_max) {
        parts.push(format!("{now} of {most} virtual functions"));
    }
    parts.extend(function.services.as_ref().map(|services| format!("services {services}")));
    parts.extend(function.state.clone());
    format!("device         {} {}", function.address, parts.join(", "))
}

fn instance(one: &InstanceStatus, lines: &mut Vec<String>) {
    let info = &one.info;
    let used = if one.claimed { ", in use" } else { "" };
    lines.push(format!(
        "instance       {} on device {} ({}, {}, NUMA node {}): {:?}{used}, {} fatal errors, {} restarts",
        info.name, info.package, info.part, info.address, info.node, one.state, one.fatals, one.restarts
    ));
    if let Some(did) = &one.counters {
        let software: Vec<String> = did
            .by_software
            .iter()
            .map(|(reason, count)| format!("{count} {}", reason.text()))
            .collect();
        lines.push(format!(
            "               {} by the device, {} in flight, {} retries; in software: {}",
            did.by_device,
            did.in_flight,
            did.retries,
            if software.is_empty() { "none".into() } else { software.join(", ") }
        ));
    }
    lines.extend(one.problem.iter().map(|problem| format!("               {problem}")));
}
