{{- /* What every job namespace has, for the pods of its jobs: (dict "root" . "namespace" "team"). */}}
{{- define "rlhfspec.inJobNamespace" }}
{{- $names := .root.Files.Get "files/names.yaml" | fromYaml }}
{{- $keep := dict "helm.sh/resource-policy" "keep" }}
---
{{ include "rlhfspec.serviceAccount" (dict "root" .root "name" $names.serviceAccount "namespace" .namespace "annotations" (merge $keep .root.Values.jobs.serviceAccount.annotations)) }}
{{- $here := . }}
{{- with .root.Values.storage }}
{{- if and .create.enabled (not .claim) }}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: {{ include "rlhfspec.claim" $here.root }}
  {{- with $here.namespace }}
  namespace: {{ . }}
  {{- end }}
  labels: {{- include "rlhfspec.labels" $here.root | nindent 4 }}
  annotations: {helm.sh/resource-policy: keep}
spec:
  accessModes: {{- toYaml .create.accessModes | nindent 4 }}
  {{- with .create.storageClass }}
  storageClassName: {{ . }}
  {{- end }}
  resources:
    requests: {storage: {{ .create.size }}}
{{- end }}
{{- end }}
{{- end }}

{{- /* Of the operator in namespaces with the label, to one ClusterRole; where a namespace is named it has a Role. */}}
{{- define "rlhfspec.jobsBinding" }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: {{ include "rlhfspec.fullname" . }}-labelled
  labels: {{- include "rlhfspec.labels" . | nindent 4 }}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: {{ include "rlhfspec.wideName" . }}-jobs}
subjects:
  - {kind: ServiceAccount, name: {{ include "rlhfspec.fullname" . }}-operator, namespace: {{ .Release.Namespace }}}
{{- end }}

{{- /* With scope cluster: the same, as a list of objects without a namespace, for the operator to make. Just as Helm
would make them, so that it takes them over without a conflict. */}}
{{- define "rlhfspec.namespaceKit" -}}
{{- $here := dict "root" . "namespace" "" }}
{{- $policies := .Values.networkPolicy.enabled | ternary (include "rlhfspec.jobPolicies" $here) "" }}
{{- $kit := list }}
{{- range $text := list (include "rlhfspec.inJobNamespace" $here) $policies (include "rlhfspec.jobsBinding" .) | join "\n" | splitList "\n---\n" }}
{{- with $text | fromYaml }}
{{- $kit = append $kit . }}
{{- end }}
{{- end }}
{{- toJson $kit }}
{{- end }}
