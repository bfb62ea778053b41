//! Keys of the reports of saved VMs. `platen/saved` compares them with the reports of its commands.

/// Key, type and meaning.
pub(super) type Key = (&'static str, &'static str, &'static str);

pub(super) const SAVE: &[Key] = &[
    (
        "status",
        "string",
        "`completed` or `failed`. After a failure there are only `status` and `error`.",
    ),
    ("error", "string, may be absent", "Why the save failed."),
    ("vm", "string", "The VM after the save: `running`, `paused`, or `gone: its QEMU has ended`."),
    (
        "total-ms",
        "integer",
        "Duration from the start of QEMU's migration to the complete image, ms.",
    ),
    (
        "stopped-ms",
        "integer or null",
        "Time for which the VM was stopped, ms: by QEMU's events, with --snapshot by its \
         query-migrate. Null for a VM that does not run after the save, or did not before.",
    ),
    (
        "image-bytes",
        "integer",
        "Length of the image, bytes; in a store, of the save and of its new pack.",
    ),
    ("pages", "integer", "Pages that are stored, superseded ones included."),
    ("superseded", "integer", "Pages of `pages` of which a later version is stored, too."),
    ("zero", "integer", "Pages received as zero, each version counted."),
    (
        "filled",
        "integer",
        "Pages received that repeat another word of 8 bytes, each version counted.",
    ),
    ("unsent", "integer", "Pages that QEMU has not sent: they are zero."),
    (
        "shared",
        "integer",
        "Pages that are equal to a page in the store or to an earlier page of the save, each \
         version counted; 0 outside a store.",
    ),
    (
        "differences",
        "integer",
        "Pages of `pages` that are stored as differences from pages that the store had.",
    ),
    ("damaged", "integer", "Units of the store that are damaged, and were therefore not shared."),
    ("accelerators", "array of objects", "Counters of each compression thread's accelerator."),
];

pub(super) const RESTORE: &[Key] = &[
    ("status", "string", "`completed` or `failed`; of several VMs, `partial` if some have failed."),
    ("error", "string, may be absent", "Why the restore failed. Then there are no figures."),
    (
        "clones",
        "array of objects, may be absent",
        "With several VMs: the report of each, in the order of the monitors. It has the keys of \
         this table but `players`; the report itself then has only `status`, `clones` and \
         `players`.",
    ),
    ("clones[].qmp", "string", "The VM's monitor."),
    ("domain", "string, may be absent", "Name of the domain. Only for `virsh-restore`."),
    ("mode", "string", "`instant` (the VM ran before its RAM was loaded) or `load`."),
    (
        "fallback",
        "string or null, may be absent",
        "Why everything was loaded first although --load was not given. Only with mode `load`.",
    ),
    (
        "vm",
        "string",
        "State of the VM at the end, by QEMU's query-status; under libvirt `running` or \
         `paused`.",
    ),
    (
        "prepared-ms",
        "number, may be absent",
        "Time until libvirt had started the QEMU, ms. Only for `virsh-restore`, not with \
         --recover.",
    ),
    (
        "loaded-ms",
        "number, may be absent",
        "Time until QEMU had all of the RAM, ms: in mode `instant` from the first byte of the \
         last player, in mode `load` from the command to QEMU to listen (`virsh-restore`: to \
         libvirt to prepare the domain). This key, `bytes` and `cpu-s` are absent if the last \
         player ended after it had sent everything.",
    ),
    (
        "bytes",
        "integer, may be absent",
        "Bytes that were written to QEMU, in mode `instant` by the last player.",
    ),
    (
        "cpu-s",
        "number, may be absent",
        "CPU time, s: in mode `instant` of the last player, in mode `load` of the command. Of \
         several VMs each report has the time for all of them until then.",
    ),
    (
        "deaths",
        "integer, may be absent",
        "Players that have ended before they had sent everything, or that were left. This key \
         and the following ones: only in mode `instant`.",
    ),
    (
        "started-ms",
        "number or null, may be absent",
        "Time from the command to QEMU to listen until QEMU had loaded the devices, ms; under \
         libvirt, until libvirt had started the CPUs. Null with --recover.",
    ),
    (
        "running-ms",
        "number, may be absent",
        "Time from the player's first byte until QEMU had loaded the devices or had resumed, \
         ms. This key and the following ones are those of the last player, and absent if it \
         ended after it had sent everything.",
    ),
    ("requests", "integer, may be absent", "Requests of QEMU for pages."),
    ("crossed", "integer, may be absent", "Requests for pages that had been sent already."),
    ("served-p50-ms", "number, may be absent", "Median time from a request to its answer, ms."),
    ("served-p99-ms", "number, may be absent", "99th percentile of that time, ms."),
    ("pages", "integer, may be absent", "Pages that were sent with their bytes."),
    ("zeros", "integer, may be absent", "Zero pages that were sent on request."),
    ("hot", "integer, may be absent", "Pages of the hot set that were sent before the VM ran."),
    (
        "players",
        "array of objects",
        "Figures of the players that have ended before the command; none in mode `load`.",
    ),
    (
        "players[].decoded-units",
        "integer",
        "Units that were read and decoded. A unit that was decoded twice counts twice.",
    ),
    ("players[].decoded-bytes", "integer", "Plain bytes of these units."),
    (
        "players[].peak-memory-bytes",
        "integer or null",
        "The most memory that the player had, bytes.",
    ),
    ("players[].cpu-s", "number", "CPU time of the player, s."),
];
