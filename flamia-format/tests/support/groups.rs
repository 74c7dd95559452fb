//! numpy's quantised groups.

use flamia_format::{Element, ExponentRule};

use super::{e2m1_values, e4m3_values, entries};

pub struct Group {
    pub element: Element,
    pub rule: ExponentRule,
    pub scale: u8,
    /// The scale's value.
    pub unit: f64,
    pub values: Vec<f32>,
    pub codes: Vec<u8>,
}

impl Group {
    /// What the codes stand for.
    pub fn decoded(&self) -> Vec<f32> {
        let values = match self.element {
            Element::E4M3 => e4m3_values(),
            Element::E2M1 => e2m1_values(),
        };
        self.codes
            .iter()
            .map(|&code| (f64::from(values[usize::from(code)]) * self.unit) as f32)
            .collect()
    }
}

pub fn nvfp4_groups() -> Vec<Group> {
    let groups: Vec<Group> = entries(include_str!("../tables/nvfp4_groups.txt"))
        .map(|entry| Group {
            element: Element::E2M1,
            rule: ExponentRule::Up,
            scale: entry[0] as u8,
            unit: f64::from(e4m3_values()[entry[0] as usize]),
            values: entry[1..17]
                .iter()
                .map(|&bits| f32::from_bits(bits))
                .collect(),
            codes: entry[17..33].iter().map(|&code| code as u8).collect(),
        })
        .collect();
    assert_eq!(groups.len(), 64);
    groups
}

pub fn mx_groups() -> Vec<Group> {
    let groups: Vec<Group> = entries(include_str!("../tables/mx_groups.txt"))
        .map(|entry| Group {
            element: match entry[0] {
                4 => Element::E2M1,
                8 => Element::E4M3,
                bits => panic!("an element of {bits} bits"),
            },
            rule: match entry[1] {
                0 => ExponentRule::Up,
                1 => ExponentRule::Floor,
                rule => panic!("rule {rule}"),
            },
            scale: entry[2] as u8,
            unit: match entry[2] {
                255 => f64::NAN,
                byte => 2f64.powi(byte as i32 - 127),
            },
            values: entry[3..35]
                .iter()
                .map(|&bits| f32::from_bits(bits))
                .collect(),
            codes: entry[35..67].iter().map(|&code| code as u8).collect(),
        })
        .collect();
    assert_eq!(groups.len(), 128);
    groups
}
