def parts_table(x): return ""
def operator_table(x): return ""
