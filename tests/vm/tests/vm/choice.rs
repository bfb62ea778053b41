//! The choice of scenarios: all, those with a name, the quick choice, one shard.
//!
//! The quick choice is that of `make test`: every promise of SPECIFICATION.md that needs a whole
//! VM, at its simplest. Of the matrix of failures it has each pair of phase and QEMU version, each
//! pair of victim and version, and each outcome.
//!
//! A shard has scenarios that follow each other, because those share VMs: to boot one under TCG
//! takes as much CPU as two scenarios.

use anyhow::{bail, ensure, Context, Result};

use crate::Scenario;

/// The quick choice outside of the matrix, which defines its own.
const QUICK: &[&str] = &[
    "guest_finds_one_wrong_bit",
    "qemu_alone_moves_a_dirtying_guest_by_multifd",
    "moves_idle_single_zstd",
    "moves_dirtying_defaults",
    "moves_dirtying_8_channels_zstd",
    "moves_whatever_was_set_before",
    "moves_insecure_2_channels",
    "auto_with_incompressible_memory",
    "auto_with_a_simulated_qat_device",
    "qatzip_on_a_simulated_device_erring",
    "a_simulated_device_that_lies_costs_the_migration_at_most",
    "qatzip_without_a_device_is_software_or_refused",
    "qpl_by_intel_s_library_in_software",
    "qpl_without_its_library_is_software_or_refused",
    "qemu_7_rehearsal_killed_before_switchover",
    "advice_for_a_running_vm_changes_nothing",
    "cancel_by_ctrl_c_2_channels",
    "cancel_by_monitor_0_channels",
    "receive_killed_2_channels",
    "receive_frozen_2_channels",
    "two_at_once_through_one_receive",
    "evacuates_all_but_the_one_that_fails",
    "relay_2_channels",
    "intruders_are_turned_away_and_harm_nobody",
    "receive_serves_the_vms_it_allows_and_no_other",
    "nothing_starts_without_certificates",
    "survives_a_link_cut_of_1_s_2_channels",
    "survives_delays_reordering_and_cuts_0_channels",
    "moves_with_deltas_over_a_link_that_is_cut",
    "cancelled_while_the_link_is_away",
    "noise_on_the_port_harms_nobody",
    "nobody_listens_at_the_peer_address",
    "the_peer_is_silent",
    "the_destination_has_other_memory",
    "qemu_7_to_10_2_channels",
    "qemu_10_to_10_multifd_zstd_passes",
    "qemu_7_to_7_xbzrle_passes",
    "qemu_7_cancel_in_device",
    "qemu_10_pause_before_switchover_2_channels",
    "qemu_10_postcopy_preempt",
    "qemu_7_postcopy_by_migrate",
    "qemu_10_colo_is_refused",
    "a_guest_that_does_not_converge_is_reported",
    "saved_7_to_7_runs_at_once",
    "saved_7_clones_of_a_killed_player_have_every_page",
    "intercepts_a_migration_to_an_address",
    "proxmox_sequence",
    "proxmox_while_the_rules_go",
    "proxmox_destination_carrier_killed_when_the_source_has_completed",
];

/// The parsed command line.
#[derive(Debug, Default)]
pub(crate) struct Choice {
    /// Only list them.
    pub(crate) list: bool,
    quick: bool,
    /// Number and count, from 1.
    shard: Option<(usize, usize)>,
    names: Vec<String>,
}

impl Choice {
    /// Parses the arguments. Flags of the standard harness that `cargo test` may pass on
    /// (`--nocapture` and the like) are ignored.
    pub(crate) fn new(words: impl Iterator<Item = String>) -> Result<Self> {
        let mut choice = Self::default();
        let mut words = words;
        while let Some(word) = words.next() {
            match word.as_str() {
                "--list" => choice.list = true,
                "--quick" => choice.quick = true,
                "--shard" => choice.shard = Some(shard(words.next())?),
                flag if flag.starts_with('-') => {}
                _ => choice.names.push(word),
            }
        }
        Ok(choice)
    }

    /// The chosen scenarios.
    ///
    /// # Errors
    /// If the quick choice names a scenario that does not exist.
    pub(crate) fn of(&self, all: Vec<Scenario>) -> Result<Vec<Scenario>> {
        for name in QUICK {
            let exists = all.iter().any(|scenario| scenario.name == *name);
            ensure!(exists, "the quick choice names {name}, which is no scenario");
        }
        let named = |s: &Scenario| {
            self.names.is_empty() || self.names.iter().any(|name| s.name.contains(name))
        };
        let is_quick = |s: &Scenario| s.quick || QUICK.contains(&s.name.as_str());
        let (nth, count) = self.shard.unwrap_or((1, 1));
        let mut chosen: Vec<Scenario> = all
            .into_iter()
            .filter(|scenario| named(scenario) && (!self.quick || is_quick(scenario)))
            .collect();
        let (begin, end) = (chosen.len() * (nth - 1) / count, chosen.len() * nth / count);
        chosen.truncate(end);
        Ok(chosen.split_off(begin))
    }
}

/// Parses `2/3`: number and count.
fn shard(word: Option<String>) -> Result<(usize, usize)> {
    let word = word.context("--shard NUMBER/COUNT")?;
    let numbers =
        word.split_once('/').and_then(|(n, of)| Some((n.parse().ok()?, of.parse().ok()?)));
    match numbers {
        Some((nth, count)) if (1..=count).contains(&nth) => Ok((nth, count)),
        _ => bail!("--shard {word}: NUMBER/COUNT, NUMBER from 1 to COUNT"),
    }
}
